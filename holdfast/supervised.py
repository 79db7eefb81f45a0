"""Lines on stderr with which a process of the job tells the supervisor what it does; mpirun forwards them.

    <01>holdfast {"began": {"rank": 3, "host": "spot-7", "pid": 4711}}       the process around a rank, rank.py
    <01>holdfast {"ended": {"rank": 3, "status": -9}}                        the same
    <01>holdfast {"restored": {"rank": 3, "step": 1200, "attempt": 2, "before": "800-a2"}}    the rank, trainer_side
    <01>holdfast {"stepped": {"rank": 3, "step": 1201}}                      the same, after its first step

and, for people as well, the error that ends a training script (`last_words`).

Only the standard library: this runs in front of every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError

ATTEMPT_VARIABLE = "HOLDFAST_RUN_ATTEMPT"
SET_ASIDE_VARIABLE = "HOLDFAST_RESTORE_SET_ASIDE"  # the setting of this name, which the supervisor adds to
MARK = "\x01holdfast "
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def own_rank() -> int:
    """This process's rank in the whole job; 0 outside one."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def say(kind: str, **fields: Any) -> None:
    """One line, whatever the program has left on its last one."""
    line = f"\n{MARK}{json.dumps({kind: fields}, separators=(',', ':'))}\n"
    with contextlib.suppress(OSError):  # nobody reads it any more: mpirun is gone, and so are we in a moment
        os.write(2, line.encode())


def tell(kind: str, *, step: int, **more: Any) -> None:
    """From a training rank: it has come so far. Nothing where no `holdfast run` listens."""
    if ATTEMPT_VARIABLE in os.environ:
        say(kind, rank=own_rank(), step=step, **more)


LAST_WORDS = re.compile(r"holdfast: rank \d+: ([A-Z]\w+): .*")


def last_words(error: HoldfastError, *, rank: int, place: str) -> str:
    """What a training rank says of the error that ends it; its first line matches `LAST_WORDS`.

    Args:
        error: It.
        rank: The rank, among the trainers.
        place: The line of the script that met the error; empty if none is known.
    """
    where = f" (at {place})" if place else ""
    return f"\nholdfast: rank {rank}: {type(error).__name__}: {error}{where}\nhelp: {error.help}\n"


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
