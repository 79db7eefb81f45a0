"""NOTICE and AT, read for the emergency of who decides: the stager, or without one rank 0 of the trainers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from holdfast.errors import ProtocolError
from holdfast.notices.decider import Call, Emergency
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.notices.sparing import Ability
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind

_STEP_SECONDS_MAX = 1e6


def hear(
    emergency: Emergency, rank: int, name: str, frame: Frame, now: float, machine: Collection[int] = ()
) -> list[Call]:
    """NOTICE or AT of a rank.

    Args:
        emergency: Is told.
        rank: Whose message it is.
        name: Who that is, for people.
        frame: The message.
        now: By the emergency's clock, in seconds.
        machine: Ranks that are known to run on the same machine.

    Raises:
        ProtocolError: The message does not hold what it should.
    """
    body = wire.json_body(frame)
    if frame.kind is Kind.NOTICE:
        notice = Notice.from_json(body)
        if notice.kind is NoticeKind.TERMINATE:
            emergency.spares.go({rank, *machine} if notice.of_machine else {rank})
        return emergency.noticed(rank, notice, notice.seconds_left(), name, now)
    seconds = step_seconds(frame, body)
    emergency.spares.can(rank, Ability.from_json(body))
    return emergency.at(rank, frame.arg, frame.step, seconds, now)


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
