"""NOTICE and AT, read for the emergency of who decides: the stager, or without one rank 0 of the trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast import wire
from holdfast.emergency import Call, Emergency
from holdfast.errors import ProtocolError
from holdfast.notice import Notice
from holdfast.wire import Frame, Kind

__all__ = ["hear", "step_seconds"]

_STEP_SECONDS_MAX = 1e6


def hear(emergency: Emergency, rank: int, name: str, frame: Frame, now: float) -> list[Call]:
    """NOTICE or AT of a rank. `name`: who it is, for people; `now`: by the emergency's clock, in seconds.

    Raises:
        ProtocolError: The message does not hold what it should.
    """
    body = wire.json_body(frame)
    if frame.kind is Kind.NOTICE:
        notice = Notice.from_json(body)
        return emergency.noticed(rank, notice, notice.seconds_left(), name, now)
    return emergency.at(rank, frame.arg, frame.step, step_seconds(frame, body), now)


def step_seconds(frame: Frame, body: Mapping[str, Any]) -> float | None:
    """How long a step of that rank takes, as its answer says; None: it does not.

    Raises:
        ProtocolError: What it says is no number of seconds.
    """
    seconds = body.get("step_seconds")
    if seconds is None:
        return None
    if not (type(seconds) in {int, float} and math.isfinite(seconds) and 0 <= seconds < _STEP_SECONDS_MAX):
        raise ProtocolError(
            f"{frame.kind.name}: step_seconds is {seconds!r:.80}, expected a number of seconds"
        )
    return float(seconds)
