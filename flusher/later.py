"""What is done later, and of which checkpoint it is: retries that wait for the store.

put(key, seconds, act) ─► due() ─► act, in the order of time        at_once(key), at_once() ─► due now
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

from flusher.steps import Key

__all__ = ["Later"]


class Later:
    """Acts with a time. For the loop's thread.

    Args:
        clock: Seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, int, Key, Callable[[], None]]] = []
        self._order = itertools.count()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    @property
    def wait_seconds(self) -> float | None:
        """How long until the first is due; None if nothing waits."""
        return max(0.0, self._waiting[0][0] - self._clock()) if self._waiting else None

    def put(self, key: Key, seconds: float, act: Callable[[], None]) -> None:
        """Do `act`, which is of checkpoint `key`, in so many seconds."""
        heapq.heappush(self._waiting, (self._clock() + seconds, next(self._order), key, act))

    def at_once(self, key: Key | None = None) -> None:
        """Do what waits now: of one checkpoint, or all of it."""
        now = self._clock()
        self._waiting = [
            (min(due, now) if key in {None, of} else due, number, of, act)
            for due, number, of, act in self._waiting
        ]
        heapq.heapify(self._waiting)

    def do_due(self) -> None:
        """Do all that is due."""
        while self._waiting and self._waiting[0][0] <= self._clock():
            _, _, _, act = heapq.heappop(self._waiting)
            act()
