"""Lines on stderr by which a process of the job reports to the supervisor; mpirun forwards them.

    <01>holdfast {"began": {"rank": 3, "host": "spot-7", "pid": 4711}}       the process around a rank, rank.py
    <01>holdfast {"ended": {"rank": 3, "status": -9}}                        the same; "out_of_memory": true where the
                                                                             kernel has killed a process for it
    <01>holdfast {"restored": {"rank": 3, "step": 1200, "attempt": 2, "before": "800-a2"}}    the rank, trainer_side
    <01>holdfast {"stepped": {"rank": 3, "step": 1201}}                      the same, after its first step
    <01>holdfast {"proof": {"rank": 0, "step": 1200, "verdict": "…", "text": "…"}}    rank 0: how that step compares

and, for people too, the error that ends a training script (`format_final_error`).

`holdfast rank` wraps one rank or torchrun. To it, ranks write lines into a file (`report`), because torchrun does not
forward the exit code of a rank and can be configured not to forward its output.

    {"pid": 4711, "rank": 3, "round": 0, "joined": {"attempt": 7, "ranks": 8}}    round: restarts by torchrun's agent
    {"pid": 4711, "rank": 3, "round": 0, "restored": {"attempt": 5}}              attempt: that saved the checkpoint
    {"pid": 4711, "rank": 3, "round": 0, "staged": {}}                            its first checkpoint is safe
    {"pid": 4711, "rank": 3, "round": 0, "noticed": {}}                           a host of the job will be taken away
    {"pid": 4711, "rank": 3, "round": 0, "ended": {"exception": "…", "text": "…"}}    both empty: no exception

Only the standard library, because every rank imports this before it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError

ATTEMPT_VARIABLE = "HOLDFAST_RUN_ATTEMPT"
KEPT_VARIABLE = "HOLDFAST_RUN_KEEPS_STAGER"  # set for a standing stager that `holdfast run` starts
SET_ASIDE_VARIABLE = (
    "HOLDFAST_RESTORE_SET_ASIDE"  # the trainer setting, to which the supervisor adds checkpoints
)
MARK = "\x01holdfast "
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def own_rank() -> int:
    """Return this process's rank in the whole job; 0 outside a job."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def emit(kind: str, **fields: Any) -> None:
    """Write one line to stderr; begin with a newline, because the program may have left an unfinished line."""
    line = f"\n{MARK}{json.dumps({kind: fields}, separators=(',', ':'))}\n"
    with contextlib.suppress(OSError):  # mpirun is gone, and will take this process with it
        os.write(2, line.encode())


def emit_progress(kind: str, *, step: int, **more: Any) -> None:
    """Report a training rank's progress to `holdfast run`, if the job has one."""
    if ATTEMPT_VARIABLE in os.environ:
        emit(kind, rank=own_rank(), step=step, **more)


FINAL_ERROR = re.compile(r"holdfast: rank \d+: ([A-Z]\w+): .*")


def format_final_error(error: HoldfastError, *, rank: int, place: str) -> str:
    """Format the error that ends a rank, so that `FINAL_ERROR` matches. `place`: the script's line, or empty."""
    where = f" (at {place})" if place else ""
    return f"\nholdfast: rank {rank}: {type(error).__name__}: {error}{where}\nhelp: {error.help}\n"


DIARY_VARIABLE = "HOLDFAST_DRILL_DIARY"
_open: dict[str, int] = {}


def is_in_drill() -> bool:
    """Whether this process is in a drill."""
    return bool(os.environ.get(DIARY_VARIABLE))


def write_diary(kind: str, value: Any) -> None:
    """Write a line to the diary, if this process is in a drill. Ignore a full disk, so that training continues."""
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
    _append(path, line)


REPORTS_VARIABLE = "HOLDFAST_RANK_REPORTS"
_TEXT_MAX = 1000


def report(kind: str, **fields: Any) -> None:
    """Report to `holdfast rank`, if it wraps this process or its launcher. Any thread."""
    path = os.environ.get(REPORTS_VARIABLE)
    if path:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _append(path, {"pid": os.getpid(), "rank": own_rank(), "round": int(restarts), kind: fields})


def register_end_report() -> None:
    """Register a report of the exception that ends this process. A process that a signal kills sends none."""
    if REPORTS_VARIABLE in os.environ:
        process = os.getpid()  # a forked child is no rank
        atexit.register(lambda: _report_end() if os.getpid() == process else None)


def _report_end() -> None:
    error = getattr(
        sys, "last_value", None
    )  # Python sets it before it calls the hook for uncaught exceptions
    kind = "" if error is None else f"{type(error).__module__}.{type(error).__qualname__}"
    text = "" if error is None else str(error)[:_TEXT_MAX]
    report("ended", exception=kind.removeprefix("builtins."), text=text)


def _append(path: str, line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        if path not in _open:
            _open[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(_open[path], json.dumps(line).encode() + b"\n")
