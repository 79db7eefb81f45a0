"""Counts calls of Python functions: what a loop in C saves, whatever machine it runs on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def python_calls(function: Callable[[], object], *, of: str = "") -> int:
    """How many functions written in Python are called, generators each time that they go on.

    Args:
        function: What is done: in this thread, and in threads that it starts.
        of: Counts those alone that stand in a file with this in its path.
    """
    counts: list[None] = []

    def counted(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and of in frame.f_code.co_filename:
            counts.append(None)

    threading.setprofile(counted)
    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(counts)


def calls_here(function: Callable[[], object]) -> int:
    """How many calls this thread makes meanwhile, in Python and in C; what a loop in C calls is not seen."""
    count = 0

    def counted(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
