"""A stager that cannot start: every trainer hears why, instead of waiting for it.

trainer ── HELLO ─► (this) ── WELCOME with the error ─► trainer ── BYE ─► forgotten
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind, Welcome

if TYPE_CHECKING:
    from stager.mpi import TrainersPort


_log = logging.getLogger("holdfast.stager")

_LEAVE_SECONDS_MAX = 10.0
_PAUSE_SECONDS = 5e-3


def refuse_start(port: TrainersPort, error: HoldfastError) -> None:
    """Tell every trainer why there will be no stager, and stay until they have heard it."""
    waiting = set(range(port.ranks))
    message = Welcome.refusal(error)
    deadline = time.monotonic() + _LEAVE_SECONDS_MAX
    while waiting and time.monotonic() < deadline:
        seen = port.poll()
        for rank, raw in seen.messages:
            try:
                kind = wire.decode(raw).kind
            except ProtocolError as broken:
                _log.warning("rank %d: %s", rank, broken)
                waiting.discard(rank)
                continue
            if kind is Kind.HELLO:
                port.send(rank, message)
            elif kind is Kind.BYE:
                waiting.discard(rank)
        waiting -= {rank for rank, _ in seen.lost}
        time.sleep(_PAUSE_SECONDS)
