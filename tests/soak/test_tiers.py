"""Nightly, more of tests/integration/test_tiers.py."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration import test_tiers as nightly
from tests.integration.test_tiers import (
    RANKS,
    SMALL_ALONE,
    check_resumed_alone,
    check_resumed_from,
    cluster,
    events,
    kill_all_ranks,
    memory,
    stager_of,
    wait_for_pause,
)
from tests.support.cluster import Cluster, check_continued
from tests.support.main_job import PAUSE_AT, RUN, SAVED, STEPS

pytestmark = [pytest.mark.mpi]

test_a_killed_stager_ends_neither_training_nor_checkpoints = (
    nightly.check_a_killed_stager_ends_neither_training_nor_checkpoints
)


def test_a_store_that_is_gone_is_not_needed(cluster: Cluster, reference: Path) -> None:
    alone = {"HOLDFAST_STORE": cluster.store, **SMALL_ALONE, "HOLDFAST_RESTORE_WITHOUT_STORE": "1"}
    with cluster.start(RANKS, *RUN, str(PAUSE_AT), stager=False, env=alone) as job:
        wait_for_pause(cluster, job, kept=SAVED)
        kill_all_ranks(cluster)
        job.wait(60)
    shutil.rmtree(cluster.store)
    Path(cluster.store).write_text("not a directory")
    with cluster.start(RANKS, *RUN, stager=False, env=alone) as job:
        job.succeed(120)
    assert "the store does not answer" in job.output()
    check_continued(reference, cluster, 1, 2, start=SAVED + 1, steps=STEPS)
    assert {event["attempt"] for event in events(cluster, "restore")} == {1}


def test_without_a_stager_a_killed_run_resumes_from_its_memory(
    cluster: Cluster, reference: Path, memory: Path
) -> None:
    check_resumed_alone(cluster, reference, memory, lost=False)
