"""What the ranks of a drill write down as they train, in one file: who they are, each step, which samples they got.

    {"time": 1.5, "attempt": 2, "rank": 0, "pid": 4711, "begins": true}
    {…, "samples": [epoch, place, count, length]}       the loop got these, of the epoch's order (sampler.py)
    {…, "step": 12}                                     Checkpointer.step() was told; before what it saves

Nothing is written where no drill listens. A line is one write, so the ranks may share the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

from holdfast.supervised import ATTEMPT_VARIABLE, own_rank

__all__ = ["DIARY_VARIABLE", "note"]

DIARY_VARIABLE = "HOLDFAST_DRILL_DIARY"
_open: dict[str, int] = {}


def note(kind: str, value: Any) -> None:
    """Write a line, if this process is in a drill. A full disk ends no training."""
    path = os.environ.get(DIARY_VARIABLE)
    if not path:
        return
    line = {
        "time": time.time(),
        "attempt": int(os.environ.get(ATTEMPT_VARIABLE, "0")),
        "rank": own_rank(),
        "pid": os.getpid(),
        kind: value,
    }
    with contextlib.suppress(OSError):
        if path not in _open:
            _open[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(_open[path], json.dumps(line).encode() + b"\n")
