"""Phases of the time from a loss until training continues. Pure: the caller passes the time.

lost ─► ended ─► launched ─► joined ─► restored ─► training
 │        │         │           │         │           └ every rank has done its first step
 │        │         │           │         └ every rank has restored its state
 │        │         │           └ all ranks and the stager have joined
 │        │         └ the supervisor has found hosts and started mpirun
 │        └ mpirun and all its processes here have ended, and the verdict is known
 └ the first sign: a process has ended, a rank is silent for too long, a host is gone
"""

from __future__ import annotations

import itertools

MARKS = ("lost", "ended", "launched", "joined", "restored", "training")


class Resumption:
    """The marks since the last loss, or since the start of the run."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def record_loss(self, now: float) -> None:
        """Record the first sign of a loss. A further loss before training continues belongs to the same resumption."""
        self._at = {"lost": self._at.get("lost", now)}

    def record_mark(self, mark: str, now: float) -> None:
        """Record a mark. A second attempt after the same loss reaches it again and clears later marks."""
        before = MARKS[: MARKS.index(mark)]
        self._at = {**{name: at for name, at in self._at.items() if name in before}, mark: now}

    def record_training(self, now: float) -> dict[str, float]:
        """Record that training continues. Return the seconds between marks, named by the later mark, and their sum."""
        self.record_mark("training", now)
        reached = [mark for mark in MARKS if mark in self._at]
        phases = {
            f"{after}_seconds": round(self._at[after] - self._at[before], 3)
            for before, after in itertools.pairwise(reached)
        }
        phases["seconds"] = round(now - self._at[reached[0]], 3)
        self._at = {}
        return phases
