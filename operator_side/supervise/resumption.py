"""How long it takes from a loss to training again, phase by phase. Pure: the times are handed in.

lost ─► ended ─► launched ─► joined ─► restored ─► training
 │        │         │           │         │           └ every rank has taken its first step
 │        │         │           │         └ every rank has its state back
 │        │         │           └ ranks and stager have met
 │        │         └ mpirun was started, on hosts that were there
 │        └ mpirun had ended, no process of it was left here, and the verdict was known
 └ the first sign: a process has ended, a rank is silent for too long, a host is gone
"""

from __future__ import annotations

import itertools

MARKS = ("lost", "ended", "launched", "joined", "restored", "training")


class Resumption:
    """The marks since the last loss, or since the start."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def lost(self, now: float) -> None:
        """First sign of a loss. Another one before training goes on belongs to the same."""
        self._at = {"lost": self._at.get("lost", now)}

    def reached(self, mark: str, now: float) -> None:
        """Came to this mark. A second attempt after the same loss comes to it again: what followed it then is void."""
        before = MARKS[: MARKS.index(mark)]
        self._at = {**{name: at for name, at in self._at.items() if name in before}, mark: now}

    def trained(self, now: float) -> dict[str, float]:
        """Training goes on. Seconds from each mark that was seen to the next, by the later one's name, and in all."""
        self.reached("training", now)
        seen = [mark for mark in MARKS if mark in self._at]
        phases = {
            f"{after}_seconds": round(self._at[after] - self._at[before], 3)
            for before, after in itertools.pairwise(seen)
        }
        phases["seconds"] = round(now - self._at[seen[0]], 3)
        self._at = {}
        return phases
