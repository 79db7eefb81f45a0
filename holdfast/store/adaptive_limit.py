"""How many requests to a store are best under way at once, from how fast those that ended were. Pure: times go in.

    growing ── faster by enough ──► wider still          narrowing ── as fast with fewer ──► narrower still
       └────── not: back ──► narrowing                       └── not: back ──► keeping ── after a while ──► growing …

Bytes a second are estimated from single requests: each brings its bytes over its own time, and so many of them run side
by side. So the ends of an upload, and the waits between two, measure nothing and count for nothing.

1. Where each connection stays as fast although there are more of them, the next step is a factor of four, else of two;
   and it is known that fewer would be slower.
2. A width that was in vain is tried again only after ever longer: the network may have more to give by then.
"""

from __future__ import annotations

import math
from enum import Enum, auto

_FASTER = 1.08  # what twice as many must bring at the least
_AS_FAST = 0.96  # what a quarter fewer may lose
_UNDISTURBED = 0.85  # of its speed that a connection keeps, beside more of them
_SAMPLES_MIN, _SAMPLES_MAX = 4, 32
_KEPT_WINDOWS, _KEPT_WINDOWS_MAX = 8, 32


class _Phase(Enum):
    FIRST = auto()
    GROWING = auto()
    NARROWING = auto()
    KEEPING = auto()


class AdaptiveLimit:
    """Finds the width. Not thread-safe.

    Args:
        least: Never fewer. `most`: never more.
    """

    def __init__(self, start: int, *, least: int, most: int) -> None:
        if not 1 <= least <= start <= most:
            raise ValueError(f"expected 1 <= least <= start <= most, got {least}, {start}, {most}")
        self._least, self._most = least, most
        self._width, self._phase = start, _Phase.FIRST
        self._base, self._base_speed = start, 0.0  # the best width so far, and bytes a second with it
        self._undisturbed = False  # fewer were slower, each connection as fast
        self._kept, self._kept_windows, self._is_turn_to_narrow = 0, _KEPT_WINDOWS, False
        self._begin(-math.inf)

    @property
    def width(self) -> int:
        """How many requests may be under way now."""
        return self._width

    def ended(self, began: float, now: float, nbytes: int, *, full: bool) -> None:
        """A request has ended.

        Args:
            began: When it began, in seconds of any clock.
            now: When it ended, of the same clock.
            nbytes: What it carried.
            full: Whether as many as allowed were under way: other requests tell nothing of the width.
        """
        if not full or began <= self._since or now <= began:
            return
        self._bytes += nbytes
        self._seconds += now - began
        self._samples += 1
        if self._samples >= min(max(self._width, _SAMPLES_MIN), _SAMPLES_MAX):
            self._decide(self._width * self._bytes / self._seconds)
            self._begin(now)

    def _begin(self, now: float) -> None:
        """A new window: requests that began before it ran beside another number of them."""
        self._since, self._bytes, self._seconds, self._samples = now, 0, 0.0, 0

    def _decide(self, speed: float) -> None:
        match self._phase:
            case _Phase.FIRST:
                self._base_speed = speed
                self._grow(4)
            case _Phase.GROWING:
                factor = self._width / self._base
                if speed >= self._base_speed * _FASTER:
                    self._undisturbed = speed >= _UNDISTURBED * factor * self._base_speed
                    self._base, self._base_speed, self._kept_windows = self._width, speed, _KEPT_WINDOWS
                    self._grow(4 if self._undisturbed else 2)
                elif factor > 2:
                    self._grow(2)
                else:
                    self._narrow()
            case _Phase.NARROWING:
                if speed >= self._base_speed * _AS_FAST:
                    # Not this speed: a little lost at each step would add up.
                    self._base, self._undisturbed = self._width, False
                    self._narrow()
                else:
                    self._undisturbed = True  # from here on fewer are slower
                    self._keep()
            case _Phase.KEEPING:
                self._base_speed += (speed - self._base_speed) / 4
                self._kept += 1
                if self._kept >= self._kept_windows:
                    self._kept_windows = min(2 * self._kept_windows, _KEPT_WINDOWS_MAX)
                    self._is_turn_to_narrow = not self._is_turn_to_narrow
                    self._undisturbed = self._undisturbed and not self._is_turn_to_narrow
                    if self._is_turn_to_narrow:
                        self._narrow()
                    else:
                        self._grow(2)

    def _grow(self, factor: int) -> None:
        self._phase, self._width = _Phase.GROWING, min(self._base * factor, self._most)
        if self._width == self._base:
            self._narrow()

    def _narrow(self) -> None:
        self._phase, self._width = _Phase.NARROWING, max(self._base * 3 // 4, self._least)
        if self._undisturbed or self._width == self._base:
            self._keep()

    def _keep(self) -> None:
        self._phase, self._width, self._kept = _Phase.KEEPING, self._base, 0
