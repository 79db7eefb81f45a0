"""A stager that cannot start: every trainer hears why, instead of waiting for it.

trainer ── HELLO ─► (this) ── WELCOME with the error ─► trainer ── BYE ─► forgotten
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.errors import HoldfastError, ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.welcome import Welcome
from stager.trainers_port import TrainersPort

_log = logging.getLogger("holdfast.stager")

_PAUSE_SECONDS = 5e-3


def refuse_start(
    port: TrainersPort, error: HoldfastError, is_stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Tell every trainer why there will be no stager, and stay until each has heard it or is gone.

    A script may load its model for minutes before it makes its Checkpointer, so nothing but their leaving ends this, or
    that this stager was told to stop.

    Returns:
        Whether a trainer has asked, and so says it.
    """
    waiting = set(range(port.ranks))
    message = Welcome.refusal(error)
    is_told = False
    while waiting and not is_stopping():
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
                is_told = True
            elif kind is Kind.BYE:
                waiting.discard(rank)
        waiting -= {rank for rank, _ in seen.lost}
        time.sleep(_PAUSE_SECONDS)
    return is_told
