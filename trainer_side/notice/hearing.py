"""SAVE_AT from the stager, and the AT that answers it."""

from __future__ import annotations

from holdfast.errors import ProtocolError
from holdfast.notices.decider import Word
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from trainer_side.notice.appointments import Appointments


def hear_appointment(frame: Frame, appointments: Appointments) -> bytes | None:
    """Tell the appointments; what to send back, if anything. Link's thread.

    Raises:
        ProtocolError: The message does not hold what it should.
    """
    try:
        word = Word(frame.flags)
    except ValueError:
        raise ProtocolError(f"SAVE_AT: flags {frame.flags}, expected 0 to {len(Word) - 1}") from None
    answer = appointments.heard(word, frame.step, frame.arg, wire.json_body(frame))
    if answer is None:
        return None
    body = appointments.ability.to_json()
    if answer.step_seconds is not None:
        body["step_seconds"] = answer.step_seconds
    return wire.encode(
        Kind.AT,
        attempt=frame.attempt,
        step=answer.next_step,
        arg=frame.arg,
        body=wire.to_json(body),
    )
