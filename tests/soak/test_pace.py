"""Nightly, more of tests/integration/test_pace.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.test_pace import RANKS, WAIT_SECONDS_MAX, Paced
from tests.integration.test_tiers import stager_of
from tests.support.cluster import wait_until
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
        # What was appointed last may not have reached every rank: each goes on from what it has heard.
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
