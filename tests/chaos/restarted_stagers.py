"""Standing stagers of one file, one of which dies and is started again within the job: no step is lost.

    moment    a point in the second checkpoint, before the ranks know that the stager's share is staged
    who       the first stager, which leads, or the second
    then      it is started again at its address, and the ranks send it its share again

The job is never started again: it takes all its checkpoints as if nothing had died.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.faultpoint import VARIABLE
from tests.chaos.cells import RANKS, SAVES
from tests.chaos.scenario import END_SECONDS_MAX
from tests.chaos.share_scenario import ShareScenario
from tests.support.events import read_events
from tests.support.standing_stager import StandingProcess

__all__ = ["RESTART_CELLS", "RestartCell", "play_restart"]

_RECONNECT_SECONDS = "2"  # of the ranks, until a stager counts as lost


class RestartCell(NamedTuple):
    """One run. `point`: of the stager that dies; `number`: which time, from 1. `share`: the stager's, from 0."""

    moment: str
    point: str
    number: int
    share: int
    who: str

    @property
    def name(self) -> str:
        """In test ids and results."""
        return f"{self.moment}, started again x {self.who}"

    @property
    def regular(self) -> bool:
        """Whether `make check` runs it."""
        return self.name in _REGULAR


_REGULAR = {"a chunk full, started again x first stager"}
_MOMENTS = (
    ("a chunk received", "chunk_received", 15),
    ("a chunk full", "chunk_full", 15),
    ("its share whole, not staged", "sealed", 2),
    ("its share staged, not told", "staged", 2),
)
RESTART_CELLS = tuple(
    RestartCell(moment, point, number, share, who)
    for moment, point, number in _MOMENTS
    for share, who in enumerate(("first stager", "second stager"))
    # Once the second share is staged, the lead may publish, and the ranks may begin the next step before they miss
    # the second stager.
    if (point, share) != ("staged", 1)
)


class RestartScenario(ShareScenario):
    """A scenario whose killed stager is started again, and whose job goes on."""

    def __init__(self, directory: Path, reference: Path, *, share: int) -> None:
        super().__init__(directory, reference, share=share, untold=False, then=2)
        self._begun_with: tuple[dict[str, str], Path, tuple[str, ...]] = ({}, directory, ())

    def _standing(
        self, env: Mapping[str, str], log: Path, settings: tuple[str, ...]
    ) -> list[StandingProcess]:
        unarmed = {name: value for name, value in env.items() if name != VARIABLE}
        self._begun_with = unarmed, log, settings
        return super()._standing(env, log, settings)

    def restart(self, cell: RestartCell) -> RestartScenario:
        """Train to the end; at the moment, the stager dies and is started again."""
        fault = f"stager@{cell.point}#{cell.number}"
        with self._start(f"{fault}=kill", HOLDFAST_RECONNECT_SECONDS_MAX=_RECONNECT_SECONDS) as job:
            self._wait_for(job, self._markers / fault)
            self._start_again(cell.share)
            job.succeed(END_SECONDS_MAX)
            self._wait_for_stager()
        return self

    def _start_again(self, index: int) -> None:
        env, log, settings = self._begun_with
        before = self._stagers[index]
        before.process.wait(END_SECONDS_MAX)
        self._stagers[index] = StandingProcess(
            self._place.url,
            env,
            log.with_suffix(f".stager-{index + 1}-again.log"),
            (*settings, "--share", f"{index + 1}/2"),
            listen=before.address,
        )

    def check_nothing_was_lost(self) -> None:
        """Check that the job, in one attempt, took every checkpoint."""
        self.check()
        assert self._events("durable", "flusher") == set(SAVES), self._all_said()
        assert {said["attempt"] for said in self._of_ranks("stager_back")} == {1}, self._all_said()
        for kind in ("declined", "failed"):
            steps = {said["step"] for said in self._of_ranks(kind)}
            # A rank that loses the first stager does not hear that an earlier step has become durable.
            assert steps <= {SAVES[0]}, f"{kind} are {steps}:\n{self._all_said()}"
        backs = len(self._of_ranks("stager_back"))
        assert backs % RANKS == 0, f"{backs} ranks have reached a stager again:\n{self._all_said()}"

    def _of_ranks(self, kind: str) -> list[dict[str, Any]]:
        said = read_events(self._event_log(1))
        return [one for one in said if (one["event"], one["role"]) == (kind, "trainer")]


def play_restart(cell: RestartCell, request: pytest.FixtureRequest, directory: Path) -> None:
    """Train, start again, check."""
    reference = request.getfixturevalue("directory_reference")
    with contextlib.closing(RestartScenario(directory, reference, share=cell.share)) as scenario:
        scenario.restart(cell).check_nothing_was_lost()
