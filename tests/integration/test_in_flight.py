"""A second staging area accepts the step that a single one declines, within its memory limit; both are exact."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.integration.jobs import in_flight
from tests.support.cluster import load, same
from tests.support.job import REPOSITORY, Job, environment
from tests.support.throttled_site import sitecustomize

pytestmark = [pytest.mark.mpi]
MIB = 1 << 20
RANKS, STEPS = 2, 4
# The image has 14 MiB: no step is staged while the store takes nothing.
STAGER = ["--chunk-bytes", "1MiB", "--ring-bytes", str(8 * MIB), "--keep-last", "0"]
SITE = REPOSITORY / "tests" / "support" / "throttled_site"


class Stalled:
    """One run against a store that takes nothing until every rank has tried all its steps."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.out, self.store = directory / "out", f"throttled://{directory / 'store'}"
        self._directory, self._events = directory, directory / "events.jsonl"
        self._env = environment(
            directory / "runtime",
            HOLDFAST_COPY_INSIDE_MS_MAX="0",
            THROTTLED_BYTES_PER_SECOND=str(1 << 30),
            THROTTLED_STALL=str(directory / "stall"),
            HOLDFAST_EVENTS=str(self._events),
            **settings,
        ) | {"PYTHONPATH": f"{SITE}{os.pathsep}{REPOSITORY}"}

    def run(self, *arguments: str) -> None:
        with Job(
            RANKS,
            [in_flight.__file__, str(self.out), *arguments],
            ["--store", self.store, *STAGER],
            env=self._env,
            log=self._directory / "job.log",
        ) as job:
            job.succeed(120)

    def said(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / name).read_text())
        return found

    def events(self, name: str, rank: int) -> list[dict[str, Any]]:
        lines = map(json.loads, self._events.read_text().splitlines())
        return [line for line in lines if line["event"] == name and line.get("rank") == rank]

    def staged(self) -> list[int]:
        return sorted(item.step for item in Catalog(open_store(self.store)).list())


def _check(run: Stalled, areas: int) -> None:
    """This many steps were taken, and the last one at the end, by all ranks the same; each file is what was saved."""
    assert run.staged() == [*range(1, areas + 1), STEPS]
    for step in run.staged():
        assert same(
            load(run.out.parent / "store" / f"step-{step:09d}.pt"), load(run.out / f"saved-{step}.pt")
        )
    for rank in range(RANKS):
        said = run.said(f"rank-{rank}.json")
        assert said["declined"] == STEPS - areas - 1
        assert set(said["causes"]) <= {"busy"}
        assert said["durable_step"] == STEPS
    # A rank that has sent its share may begin another step before it hears that the others have no room.
    assert min(sum(run.said(f"rank-{rank}.json")["took"]) for rank in range(RANKS)) == areas


def test_two_areas_take_two_within_their_limit(tmp_path: Path) -> None:
    limit = 16 * MIB
    run = Stalled(tmp_path, HOLDFAST_IN_FLIGHT_MAX="8", HOLDFAST_HOST_BYTES_MAX=str(limit))
    run.run(str(STEPS))
    _check(run, 2)
    for rank in range(RANKS):
        (planned,) = run.events("plan", rank)
        assert planned["in_flight_max"] == limit // planned["slice_bytes"] == 2
        assert max(line["in_flight"] for line in run.events("save", rank)) == 2
        said = run.said(f"rank-{rank}.json")
        print(f"rank {rank}: peak {(said['peak'] - said['baseline']) / MIB:.1f} MiB above the baseline")
        assert said["peak"] - said["baseline"] <= limit + 64 * MIB
    for step in run.staged():
        (run.out / f"taken-{step}").touch()
    run.run("--restore")
    for rank in range(RANKS):
        assert run.said(f"restored-{rank}.json") == {"1": True, "2": True, str(STEPS): True}
