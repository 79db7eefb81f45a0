"""A directory that one of all workers makes, once for the whole test run, and many tests look at.

first who asks: lock ─► make ─► mark; everybody else waits for the lock, and finds it made
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["made_once"]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The directory of this name; nobody may change what is in it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # that of all workers
    directory, made = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(directory, ignore_errors=True)  # of one that failed half-way
            directory.mkdir()
            make(directory)
            made.touch()
    return directory
