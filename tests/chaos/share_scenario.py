"""The scenario of tests/chaos/scenario.py, with real stagers that write one file, and real ranks under torchrun.

    first job    two stagers, each with a fault of its own
    next job     one stager or two, after the end of the surviving flushers

For the moments that need ranks: they die while shares are under way, or before a stager has told them that its share
is staged.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.faultpoint import VARIABLE
from holdfast.ring.directory import runtime_directory
from tests.chaos.cells import RANKS, SAVES
from tests.chaos.place import DirectoryPlace
from tests.chaos.scenario import Scenario
from tests.support.cluster import wait_until
from tests.support.events import read_events
from tests.support.job import Job
from tests.support.standing_stager import StandingProcess

__all__ = ["RANK_SHARE_CELLS", "RankShareCell", "play_rank_shares"]

_FLUSHER_SECONDS_MAX = 90.0
_ALL_RANKS = tuple(f"rank:{rank}" for rank in range(RANKS))
_EVERYTHING = (*_ALL_RANKS, "stager:0", "stager:1", "flusher:0", "flusher:1")


class RankShareCell(NamedTuple):
    """One run.

    Attributes:
        moment: Name of the moment. `where`: process and point; `share`: that of the stager or flusher.
        number: Which time, from 1.
        staged: How many saves are staged on all machines then.
        then: Number of stagers of the next job.
    """

    moment: str
    where: str
    share: int
    number: int
    staged: int
    who: str
    victims: tuple[str, ...]
    then: int = 2

    @property
    def row(self) -> str:
        """Its row in the table."""
        return f"{self.moment}, then {self.then}"

    @property
    def name(self) -> str:
        """In test ids and results."""
        return f"{self.row} x {self.who}"

    @property
    def regular(self) -> bool:
        """Whether `make check` runs it."""
        return self.name in _REGULAR


_REGULAR = {
    "a chunk full at the second, then 2 x second stager",
    "the second has not told, then 1 x all ranks",
}
_WHO: Mapping[str, tuple[str, ...]] = {
    "a rank": ("rank:1",),
    "all ranks": _ALL_RANKS,
    "first stager": ("stager:0",),
    "second stager": ("stager:1",),
    "first flusher": ("flusher:0",),
    "second flusher": ("flusher:1",),
    "everything": _EVERYTHING,
}
RANK_SHARE_CELLS = tuple(
    RankShareCell(moment, where, share, number, staged, who, _WHO[who], then)
    for moment, where, share, number, staged, whos in (
        ("a frame sent", "rank:1@frame_sent", 0, 17, 1, ("a rank", "all ranks")),
        ("a slice sent", "rank:1@slice_sent", 0, 3, 1, ("a rank", "all ranks")),
        ("a chunk full at the first", "stager@chunk_full", 0, 15, 1, ("first stager", "all ranks")),
        ("a chunk full at the second", "stager@chunk_full", 1, 15, 1, ("second stager", "all ranks")),
        ("the first has not told", "stager@staged", 0, 2, 2, ("first stager", "all ranks", "everything")),
        ("the second has not told", "stager@staged", 1, 2, 2, ("second stager", "all ranks", "everything")),
        ("a part of the first", "flusher@part_written", 0, 13, 1, ("first flusher", "all ranks")),
        ("a part of the second", "flusher@part_written", 1, 14, 1, ("second flusher", "all ranks")),
    )
    for who in whos
    for then in (1, 2)
)


class ShareScenario(Scenario):
    """A scenario with several stagers. `share`: its stager and flusher have the fault armed."""

    def __init__(self, directory: Path, reference: Path, *, share: int, untold: bool, then: int) -> None:
        super().__init__(DirectoryPlace(directory / "store"), directory, reference, tcp=True)
        self._share, self._untold, self._then_stagers = share, untold, then
        self._writers: list[int] = []

    def _standing(
        self, env: Mapping[str, str], log: Path, settings: tuple[str, ...]
    ) -> list[StandingProcess]:
        writers = 2 if not self._writers else self._then_stagers
        self._writers.append(writers)
        unarmed = {name: value for name, value in env.items() if name != VARIABLE}
        return [
            StandingProcess(
                self._place.url,
                env if index == self._share else unarmed,
                log.with_suffix(f".stager-{index + 1}.log"),
                (*settings, "--share", f"{index + 1}/{writers}"),
            )
            for index in range(writers)
        ]

    def _directories(self, machine: Path) -> list[Path]:
        return [runtime_directory(self._place.url, machine, share=share) for share in range(2)]

    def _pid(self, victim: str, job: Job, number: int) -> int:
        role, _, index = victim.partition(":")
        if role == "stager":
            return self._stagers[int(index)].process.pid
        if role == "flusher":
            return int((self._directories(self._machines[-1])[int(index)] / "flusher.pid").read_text())
        return super()._pid(victim, job, number)

    def _events(self, event: str, role: str, number: int | None = None) -> set[int]:
        if (event, role) != ("staged", "stager"):
            return super()._events(event, role, number)
        found: set[int] = set()
        for job in range(1, self._jobs + 1) if number is None else (number,):
            told = Counter(self._staged(job))
            found |= {step for step, times in told.items() if times >= self._writers[job - 1]}
        return found

    def _staged(self, job: int) -> list[int]:
        said = read_events(self._event_log(job))
        return [int(one["step"]) for one in said if (one["event"], one["role"]) == ("staged", "stager")]

    def _wait_for(self, job: Job, marker: Path) -> int:
        pid = super()._wait_for(job, marker)
        if self._untold:  # this stager's event is missing, those of the others are not
            wait_until(
                lambda: SAVES[1] in self._staged(self._jobs), 60, lambda: f"not staged:\n{self._said(job)}"
            )
        return pid

    def _check_listed(self, allowed: Iterable[int]) -> None:
        # A share that was not reported as staged may be whole in its ring all the same.
        super()._check_listed({*allowed, *SAVES[:2]})

    def wait_for_flushers(self) -> None:
        """Wait until the flushers of the first job have ended."""
        self._wait_for_flusher(self._machines[-1])

    def _wait_for_flusher(self, machine: Path) -> None:
        for directory in self._directories(machine):
            wait_until(
                lambda directory=directory: not directory.exists(),  # type: ignore[misc]
                _FLUSHER_SECONDS_MAX,
                lambda directory=directory: f"{directory} is still there:\n{self._all_said()}",  # type: ignore[misc]
            )


def play_rank_shares(cell: RankShareCell, request: pytest.FixtureRequest, directory: Path) -> None:
    """Kill, relaunch, check."""
    scenario = ShareScenario(
        directory,
        request.getfixturevalue("directory_reference"),
        share=cell.share,
        untold=cell.where == "stager@staged",
        then=cell.then,
    )
    with contextlib.closing(scenario):
        scenario.kill(*cell.victims, at=cell.where, n=cell.number, staged=cell.staged)
        # Otherwise the next job's stager starts the second share's flusher.
        if cell.then == 1 and cell.who != "everything":
            scenario.wait_for_flushers()
        scenario.relaunch().check()
