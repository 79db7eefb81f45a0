"""What the stager has said of steps that this rank has not offered yet, and how long it has said nothing.

    DECLINED 7 (rank 1 was busy) ─► Verdicts ─► save(7) learns it before it copies anything
    every message                ─► Silence  ─► at the limit: the stager is lost

Both are the link's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from holdfast.errors import PeerLost
from holdfast.wire.frames import Frame

__all__ = ["Silence", "Verdicts"]

_KEPT = 256
_STALL_SECONDS_MAX = 1.0  # of silence counted for one turn: a process that was stopped has not listened


class Verdicts:
    """The newest verdicts on steps that were not offered. Written by the link's thread, read by any."""

    def __init__(self) -> None:
        self._frames: OrderedDict[int, Frame] = OrderedDict()

    def keep(self, frame: Frame) -> None:
        """Remember one; the oldest go."""
        self._frames[frame.step] = frame
        while len(self._frames) > _KEPT:
            self._frames.popitem(last=False)

    def of(self, step: int) -> Frame | None:
        """What was said of `step`, if anything was."""
        return self._frames.get(step)


class Silence:
    """For how long nothing was heard, as far as this process has listened.

    Args:
        rank: Who listens.
        seconds_max: The limit.
        clock: Seconds that only go forward.

    Attributes:
        looked_at: When it was looked at last.
        seconds: The silence so far.
    """

    def __init__(self, rank: int, seconds_max: float, clock: Callable[[], float]) -> None:
        self._rank, self._seconds_max, self._clock = rank, seconds_max, clock
        self.looked_at = clock()
        self.seconds = 0.0

    def note(self, heard: bool) -> None:
        """Once per turn: whether anything has come.

        Raises:
            PeerLost: The limit is reached.
        """
        now = self._clock()
        self.seconds = 0.0 if heard else self.seconds + min(_STALL_SECONDS_MAX, now - self.looked_at)
        self.looked_at = now
        if self.seconds > self._seconds_max:
            raise PeerLost(
                f"rank {self._rank} heard nothing from the stager for {self._seconds_max:g} s; it is dead, stopped or "
                "cut off"
            )
