"""Nightly, more of tests/integration/test_pace.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.jobs import pacing
from tests.integration.test_pace import RANKS, WAIT_SECONDS_MAX, Paced
from tests.integration.test_standing_stager import scene
from tests.integration.test_tiers import stager_of
from tests.support.cluster import Cluster, wait_until
from tests.support.standing_scene import Scene
from tests.support.throttled_site import sitecustomize

pytestmark = [pytest.mark.mpi]


def test_after_the_stagers_death_all_ranks_go_on_at_the_same_steps(tmp_path: Path) -> None:
    run = Paced(tmp_path, HOLDFAST_TIERS="memory")
    with run.cluster.start(RANKS) as job:
        paced = run.wait_for(job, 0, longer=True, than=0)
        run.train_until(job, paced["first_step"] + 2 * paced["every"])
        os.kill(stager_of(run.cluster.runtime), signal.SIGKILL)
        wait_until(lambda: len(run.events("stager_lost")) == RANKS, WAIT_SECONDS_MAX, job.output)
        lost_at = int((run.cluster.out(1) / "step").read_text())
        # The last interval may not have reached every rank: each continues with the last one that it got.
        every = 1 << (max(line["every"] for line in run.events("interval")) - 1).bit_length()
        run.train_until(job, lost_at + 4 * every)
        (run.cluster.out(1) / "stop").touch()
        job.wait(60)
    after = [[step for step in run.tried(rank) if step > lost_at + 2] for rank in range(RANKS)]
    for steps in after:
        apart = steps[1] - steps[0]
        assert apart.bit_count() == 1
        assert steps == [step for step in range(steps[0], steps[-1] + 1) if (step + 1) % apart == 0]
    assert set(after[0]) <= set(after[1]) or set(after[1]) <= set(after[0])
    complete = {line["step"] for line in run.events("complete") if line["step"] > lost_at + 2}
    assert complete, "nothing was complete in the tier without the stager"
    assert complete <= set(after[0]) & set(after[1])


def test_an_interval_that_is_found_beside_a_standing_stager_is_the_same_on_all_ranks(scene: Scene) -> None:
    scene.cluster = Cluster(scene.directory, scene.cluster.store, scene.env, script=pacing.__file__)
    with scene.start([], PACING_STEP_SECONDS="0.01") as job:
        wait_until(lambda: len(scene.events("interval")) > 0, 120, lambda: f"no interval:\n{job.output()}")
        (interval, *_) = scene.events("interval")
        step = scene.cluster.out(1) / "step"
        wait_until(
            lambda: int(step.read_text() or 0) > interval["first_step"] + interval["every"], 120, job.output
        )
        (scene.cluster.out(1) / "stop").touch()
        job.succeed(120)
    tried = [
        sorted({line["step"] for line in scene.events("save", "declined") if line.get("rank") == rank})
        for rank in range(RANKS)
    ]
    assert tried[0] == tried[1]
    assert interval["first_step"] in tried[0]
