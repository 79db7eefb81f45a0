"""Decides whether to start a checkpoint before a deadline. Pure arithmetic on measured times.

    now ─► in flight is staged ─► next step boundary ─► a new one is staged ─► safety ─► deadline
           └── in_flight_seconds  └── step_seconds      └── staged_seconds

If the sum fits, TAKE a checkpoint. If not, FINISH the checkpoints in flight and leave the bandwidth to them; with none
in flight, SKIP and report the loss. A time that was never measured counts as zero, because a failed try costs only what
would be lost anyway. Staged is enough, because the stager's machine stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_SAFETY_FACTOR = 1.25  # on top of the slowest of the last few checkpoints
_SAFETY_SECONDS = 1.0
_REMEMBERED = 4


class Choice(StrEnum):
    """The decision about a notice."""

    TAKE = "take"
    FINISH = "finish"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class InFlight:
    """A checkpoint that is being sent to the stager."""

    step: int
    fraction: float  # of its bytes that have arrived, 0 to 1
    elapsed_seconds: float  # seconds since its first offer


@dataclass(frozen=True, slots=True)
class Outlook:
    """The facts at the time of the decision. None: not known."""

    seconds_left: float | None  # seconds until the deadline; None: there is no deadline
    staged_seconds: float | None  # a new checkpoint's time from offer to staged, with nothing else in flight
    in_flight: Sequence[InFlight] = ()  # oldest first
    step_seconds: float | None = None  # time of a training step
    next_step: int = 0  # the first step that a new checkpoint could be of
    staged_step: int = -1  # the newest staged step; -1: none
    safe_state: str = "staged"  # word for a checkpoint that survives its ranks, such as `staged`


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision, with its reason."""

    choice: Choice
    reason: str
    wait_seconds: float = 0.0  # with TAKE: wait this long for the checkpoints in flight
    needed_seconds: float = 0.0  # expected total time for a new checkpoint; 0 if nothing was measured


def should_save(outlook: Outlook) -> Decision:
    flight_seconds = _in_flight_seconds(outlook)
    left = outlook.seconds_left
    if left is None:
        return Decision(Choice.TAKE, "there is no deadline", flight_seconds)
    if left <= 0:
        return _finish_or_skip(outlook, f"the deadline passed {-left:.1f} s ago")
    if outlook.staged_seconds is None:
        return Decision(
            Choice.TAKE,
            f"{left:.1f} s are left, and no checkpoint was {outlook.safe_state} yet that would say how long one takes",
            min(flight_seconds, left / 2),  # an estimate from the first bytes may far exceed the time left
        )
    needed = flight_seconds + (outlook.step_seconds or 0.0) + outlook.staged_seconds
    needed = _SAFETY_FACTOR * needed + _SAFETY_SECONDS
    if needed <= left:
        return Decision(
            Choice.TAKE, f"{left:.1f} s are left, {needed:.1f} s are needed", flight_seconds, needed
        )
    return _finish_or_skip(outlook, f"{left:.1f} s are left, a new one needs {needed:.1f} s", needed)


def _finish_or_skip(outlook: Outlook, reason: str, needed_seconds: float = 0.0) -> Decision:
    if outlook.in_flight:
        steps = ", ".join(str(flight.step) for flight in outlook.in_flight)
        return Decision(Choice.FINISH, f"{reason}; step {steps} is finished", 0.0, needed_seconds)
    behind = outlook.next_step - 1 - outlook.staged_step
    kept = f"step {outlook.staged_step}" if outlook.staged_step >= 0 else "nothing"
    return Decision(
        Choice.SKIP,
        f"{reason}; {kept} is {outlook.safe_state}, {max(0, behind)} steps are lost",
        0.0,
        needed_seconds,
    )


def _in_flight_seconds(outlook: Outlook) -> float:
    """Estimate the time until all checkpoints in flight are staged: the shorter of two estimates for each, by its own
    speed and by the time of earlier checkpoints.
    """
    seconds = 0.0
    for flight in outlook.in_flight:
        left, known = 1 - flight.fraction, []
        if flight.fraction > 0:
            known.append(flight.elapsed_seconds * left / flight.fraction)
        if outlook.staged_seconds is not None:
            known.append(outlook.staged_seconds * left)
        seconds += min(known, default=0.0)
    return seconds


class StagingTimes:
    """Bytes and time to staged of the last few checkpoints."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def add(self, nbytes: int, seconds: float) -> None:
        """Note a staged checkpoint, and the seconds since its first offer."""
        self._recent.append((nbytes, seconds))

    def staged_seconds(self) -> float | None:
        """Estimate the time of a checkpoint as large as the last, by the slowest remembered; None before the first."""
        if not self._recent:
            return None
        wanted = self._recent[-1][0]
        return max(seconds * max(1.0, wanted / max(1, nbytes)) for nbytes, seconds in self._recent)
