"""The messages by which ranks agree on a step, and the log lines and events of the deciding process.

    decider ── SAVE_AT or SAVE_EVERY: Announcement ──► every rank
            ◄────────────── AT or HERE: StepAnswer ──┘

docs/wire.md describes the bytes. Bodies are untrusted input: a wrong field raises a `ProtocolError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.errors import ProtocolError
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind

_STEP_SECONDS_MAX = 1e6


class AnnouncementKind(Enum):
    """The meaning of an announcement; sent in `flags`."""

    PROPOSED = 0
    APPOINTED = 1
    CALLED_OFF = 2
    LOOSE = 3  # only in SAVE_EVERY


@dataclass(frozen=True, slots=True)
class Announcement:
    """The decider's message to every rank. `number`: of the proposal. `body`: the action at an appointed step."""

    kind: AnnouncementKind
    step: int
    number: int
    body: Mapping[str, Any] = field(default_factory=dict)

    def to_frame(self, kind: Kind, *, attempt: int) -> bytes:
        body = wire.to_json(self.body)
        return wire.encode(
            kind, attempt=attempt, step=self.step, flags=self.kind.value, arg=self.number, body=body
        )

    @classmethod
    def from_frame(cls, frame: Frame) -> Announcement:
        """Parse a SAVE_AT or a SAVE_EVERY. Raises `ProtocolError`: a field is wrong."""
        last = AnnouncementKind.LOOSE if frame.kind is Kind.SAVE_EVERY else AnnouncementKind.CALLED_OFF
        if not 0 <= frame.flags <= last.value:
            raise ProtocolError(f"{frame.kind.name}: flags {frame.flags}, expected 0 to {last.value}")
        return cls(AnnouncementKind(frame.flags), frame.step, frame.arg, wire.json_body(frame))


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """A rank's answer to a proposal."""

    number: int
    next_step: int  # the step after the last one that this rank has reached
    step_seconds: float | None = None  # time of a training step; None: not known yet
    body: Mapping[str, Any] = field(default_factory=dict)

    def to_frame(self, kind: Kind, *, attempt: int) -> bytes:
        seconds = {} if self.step_seconds is None else {"step_seconds": self.step_seconds}
        body = wire.to_json({**self.body, **seconds})
        return wire.encode(kind, attempt=attempt, step=self.next_step, arg=self.number, body=body)

    @classmethod
    def from_frame(cls, frame: Frame) -> StepAnswer:
        """Parse an AT or a HERE, but no further fields of `body`. Raises `ProtocolError`."""
        body = wire.json_body(frame)
        seconds = body.get("step_seconds")
        if seconds is not None and not (
            type(seconds) in {int, float} and 0 <= seconds < _STEP_SECONDS_MAX  # neither NaN nor infinite
        ):
            raise ProtocolError(
                f"{frame.kind.name}: step_seconds is {seconds!r:.80}, expected a number of seconds"
            )
        return cls(frame.arg, frame.step, None if seconds is None else float(seconds), body)


@dataclass(frozen=True, slots=True)
class EventLine:
    """A log line that is also an event. `is_error`: a checkpoint is lost, or a person must act."""

    event: str
    text: str
    fields: Mapping[str, Any]
    is_error: bool = False


Effect = Announcement | EventLine


def apply_effects(
    effects: Sequence[Effect],
    kind: Kind,
    send_to_all: Callable[[bytes], None],
    events: EventLog,
    *,
    attempt: int,
    log: logging.Logger,
) -> None:
    """Send, log and record `effects` in order; send announcements as `kind`. Only for the decider's thread."""
    for effect in effects:
        if isinstance(effect, EventLine):
            log.log(logging.ERROR if effect.is_error else logging.WARNING, "%s", effect.text)
            events.emit(effect.event, dict(effect.fields))
        else:
            send_to_all(effect.to_frame(kind, attempt=attempt))
