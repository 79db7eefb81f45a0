"""The body of DOUBT and DOUBTED: a rank has seen its state change in a way that the gate does not prevent."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from holdfast.errors import ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind

_REASON_CHARACTERS_MAX = 1000
EARLIER_ATTEMPTS_MAX = 1000


class Doubt(NamedTuple):
    """One rank's doubt about its copies."""

    rank: int
    steps: tuple[int, int] | None  # first and last step that may be torn, inclusive; None if no step is
    reason: str
    # The job's attempts before it lost a stager and reached one again: the steps may be theirs, too.
    earlier_attempts: tuple[int, ...] = ()

    def sentence(self) -> str:
        """The mark of each doubtful checkpoint, for people."""
        if self.steps is None:
            return ""
        first, last = self.steps
        which = f"step {first} was" if first == last else f"steps {first} to {last} were"
        behind = f"{which} copied on rank {self.rank} while training went on"
        return f"{behind}, and such a change may have come into the copy"

    def covers(self, step: int) -> bool:
        return self.steps is not None and self.steps[0] <= step <= self.steps[1]

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "steps": list(self.steps or ()),
            "reason": self.reason[:_REASON_CHARACTERS_MAX],
            **({"earlier_attempts": list(self.earlier_attempts)} if self.earlier_attempts else {}),
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """Read what `to_json` wrote. Raises `ValueError`."""
        rank, steps, reason = body.get("rank"), body.get("steps"), body.get("reason")
        earlier = body.get("earlier_attempts", [])
        if not isinstance(earlier, list) or len(earlier) > EARLIER_ATTEMPTS_MAX:
            raise ValueError(
                f"expected at most {EARLIER_ATTEMPTS_MAX} earlier attempts, got {earlier!r:.200}"
            )
        if not isinstance(steps, list) or not isinstance(reason, str) or len(steps) not in (0, 2):
            raise ValueError(f"expected a rank, no or two steps, and a reason, got {body!r:.200}")
        numbers = wire.whole_numbers([rank, *steps])
        if numbers[1:] != tuple(sorted(numbers[1:])):
            raise ValueError(f"expected the first step before the last, got {steps}")
        doubtful = (numbers[1], numbers[2]) if steps else None
        return cls(numbers[0], doubtful, reason[:_REASON_CHARACTERS_MAX], wire.whole_numbers(earlier))

    def to_frame(self, kind: Kind, *, attempt: int) -> bytes:
        """Encode as DOUBT to the stager or to rank 0, or as DOUBTED to all ranks."""
        return wire.encode(kind, attempt=attempt, body=wire.to_json(self.to_json()))

    @classmethod
    def from_frame(cls, frame: Frame) -> Self:
        """Read the body. Raises `ProtocolError`: it is malformed."""
        try:
            return cls.from_json(wire.json_body(frame))
        except ValueError as error:
            raise ProtocolError(f"{frame.kind.name}: {error}") from error
