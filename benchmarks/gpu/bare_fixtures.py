"""A pytest plugin with the fixtures of tests/gpu, for machines that cannot import the suite's own; and a wait.

The first test waits for the file that GPU_TESTS_BEGIN names: the imports before it take long and need no device.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["pytest_runtestloop", "tmpfs"]

_LOOK_SECONDS = 0.02


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Wait, then let pytest's own loop run."""
    begin = os.environ.get("GPU_TESTS_BEGIN")
    while begin and not Path(begin).exists():
        time.sleep(_LOOK_SECONDS)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as directory:
        yield Path(directory)
