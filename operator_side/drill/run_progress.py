"""Says how far a run of a drill is: which run, which step, how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

SECONDS_BETWEEN = 10.0


def number_of_steps(steps: Collection[int]) -> int:
    """How many steps a run did; at least one. Lightning's callback leaves numbers out, as at the end of an epoch."""
    return max(steps) + (1 if min(steps) == 0 else 0)


class RunProgress:
    """`now`: seconds of a clock that only goes forward. `steps`: of the whole run; 0: not known."""

    def __init__(self, run: str, say: Callable[[str], None], now: float, *, steps: int = 0) -> None:
        self._run, self._say, self._steps = run, say, steps
        self._began_at = self._said_at = now
        self._step = self._said_step = -1

    def look(self, diary: Iterable[Mapping[str, Any]], now: float) -> None:
        """Take the new lines of the diary; say the first step at once, and how far it is every ten seconds."""
        for line in diary:
            if "step" in line:
                self._step = int(line["step"])
        is_first = self._said_step < 0 <= self._step
        if not is_first and now < self._said_at + SECONDS_BETWEEN:
            return
        self._said_at, self._said_step = now, self._step
        of = f" of {self._steps}" if self._steps else ""
        where = f"step {self._step}{of} is done" if self._step >= 0 else "no step is done yet"
        self._say(f"{self._run}: {where}, {now - self._began_at:.0f} s after its start")
