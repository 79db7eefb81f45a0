"""SAVE_EVERY from the stager, and the HERE that answers it."""

from __future__ import annotations

from holdfast.errors import ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.pace import PaceWord
from trainer_side.link.schedule import Schedule


def hear_pace(frame: Frame, schedule: Schedule, step_seconds: float | None) -> bytes | None:
    """Tell the schedule; what to send back, if anything. Link's thread.

    Raises:
        ProtocolError: The message does not hold what it should.
    """
    try:
        word = PaceWord(frame.flags)
    except ValueError:
        raise ProtocolError(f"SAVE_EVERY: flags {frame.flags}, expected 0 to {len(PaceWord) - 1}") from None
    reply = schedule.heard(word, frame.step, frame.arg, wire.json_body(frame))
    if reply is None:
        return None
    body = {"refusal": reply.refusal} if reply.refusal else {}
    said = {} if step_seconds is None else {"step_seconds": step_seconds}
    return wire.encode(
        Kind.HERE,
        attempt=frame.attempt,
        step=reply.next_step,
        arg=frame.arg,
        body=wire.to_json({**body, **said}),
    )
