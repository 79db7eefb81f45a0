"""A directory that one worker makes once for the whole test run, and that many tests read.

first worker: lock ─► make ─► mark; all others wait for the lock, and find the mark
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
    """Return the directory of this name; its users must not change it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # shared by all workers
    directory, made = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(directory, ignore_errors=True)  # leftovers of a worker that failed half-way
            directory.mkdir()
            make(directory)
            made.touch()
    return directory
