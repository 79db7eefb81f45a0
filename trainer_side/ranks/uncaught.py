"""An uncaught `HoldfastError`: one rank prints one message, and all ranks exit with the code of its class.

    uncaught on this rank ─► sent to the ranks above ─► a rank below has sent the same? ─ yes ─► ends quietly
                                                                        └─ no, or rank 0 ─► prints it, with the place

All ranks fail with the same refusal: fifty lines of traceback from each would hide its one sentence. Every other
exception goes to the previous hook.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from holdfast.errors import HoldfastError
from holdfast.supervised import format_final_error, own_rank
from trainer_side.ranks.deadlines import within
from trainer_side.ranks.joined import joined_world
from trainer_side.ranks.ports import RanksPort

_log = logging.getLogger("holdfast.trainer")

_LISTEN_SECONDS = 2.0  # an agreed refusal is raised on all ranks almost at once
_PAUSE_SECONDS = 5e-3
# A rank other than 0 tells only this many: thousands of ranks would send each other millions of messages.
_NEXT_RANKS = 16
_RANK_PREFIX = re.compile(r"^(rank \d+: )+")
_PACKAGES = frozenset({"trainer_side", "holdfast"})
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install_exit_code_hook() -> None:
    """Install the hook for uncaught `HoldfastError`s. May be called again."""
    previous: _Hook = sys.excepthook
    process = os.getpid()  # a forked child has no connection of its own to the other ranks
    if getattr(previous, "is_holdfast_hook", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, HoldfastError) or os.getpid() != process:
            previous(kind, error, trace)
            return
        _log.debug("traceback of the error", exc_info=(kind, error, trace))
        _report(error, trace)
        sys.stdout.flush()
        # The interpreter runs its exit handlers, then ends with this code.
        raise SystemExit(error.exit_code)

    hook.is_holdfast_hook = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _report(error: HoldfastError, trace: TracebackType | None) -> None:
    world = joined_world()  # None before the ranks have met
    port = None if world is None else world.uncaught_port()
    if (port is None or _must_print_in_time(port, error)) and sys.__stderr__ is not None:
        # Not sys.stderr: torch.distributed replaces it while its own hook runs around this one.
        rank = own_rank() if port is None else port.rank
        sys.__stderr__.write(format_final_error(error, rank=rank, place=_caller_location(trace)))
        sys.__stderr__.flush()


def _must_print_in_time(port: RanksPort, error: HoldfastError) -> bool:
    """`must_print`, or True after a timeout: the messages may go through a process that is stopped."""
    try:
        return within(lambda: must_print(port, error), 2 * _LISTEN_SECONDS, name="holdfast-last-words")
    except TimeoutError:
        return True


def must_print(port: RanksPort, error: HoldfastError, *, seconds_max: float = _LISTEN_SECONDS) -> bool:
    """Whether this rank must print the error: no rank below has sent the same one within `seconds_max`."""
    mine = [error.code, _RANK_PREFIX.sub("", str(error))]
    message = json.dumps(mine).encode()
    above = range(port.rank + 1, port.ranks)
    try:
        for rank in above if port.rank == 0 else above[:_NEXT_RANKS]:
            port.send(rank, message)
        deadline = time.monotonic() + seconds_max
        while port.rank > 0 and time.monotonic() < deadline:
            if any(rank < port.rank and json.loads(received) == mine for rank, received in port.poll()):
                return False
            time.sleep(_PAUSE_SECONDS)
    except HoldfastError as lost:
        _log.debug("the other ranks are not told: %s", lost)
    return True


def _caller_location(trace: TracebackType | None) -> str:
    """Where the script has called holdfast, as `train.py:45`."""
    frames = traceback.extract_tb(trace)
    own = [Path(__file__).parents[2] / package for package in _PACKAGES]
    theirs = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, own))]
    called = [frame for frame in theirs if "site-packages" not in frame.filename] or theirs
    return f"{called[-1].filename}:{called[-1].lineno}" if called else ""
