"""Counts calls of Python functions: a measure of the work moved into C loops that does not depend on the machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def python_calls(function: Callable[[], object], *, of: str = "") -> int:
    """Count calls of functions written in Python; each resumption of a generator counts as a call.

    Args:
        function: Called once; calls in threads that it starts count too.
        of: Count only functions in files with this in their path.
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
    """Count the calls that this thread makes in `function`, in Python and in C; calls made by a C loop are not seen."""
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
