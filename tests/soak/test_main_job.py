"""Nightly, more of tests/story/test_main_job.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.store import open_store
from holdfast.store.generic import GenericStore
from holdfast.store.retrying import Retrying
from tests.integration.jobs import train
from tests.story.test_main_job import check_files, check_killed_and_continued, local
from tests.support.cluster import Cluster, kill_ranks, load
from tests.support.fsspec_site import sitecustomize
from tests.support.job import REPOSITORY
from tests.support.main_job import PAUSE_AT, RUN, SAVED

pytestmark = [pytest.mark.mpi]


def test_a_job_resumes_from_a_store_of_any_fsspec_driver(tmp_path: Path) -> None:
    """A store with an fsspec driver and no backend of holdfast's own: killed, and resumed from."""
    store = tmp_path / "store"
    site = REPOSITORY / "tests" / "support" / "fsspec_site"
    env = {"PYTHONPATH": f"{site}{os.pathsep}{REPOSITORY}"}
    cluster = Cluster(tmp_path, f"elsewhere://{store}", env, script=train.__file__)
    opened = open_store(cluster.store)
    assert isinstance(opened, Retrying)
    assert isinstance(opened.inner, GenericStore)
    with cluster.start(2, *RUN, str(PAUSE_AT)) as job:
        kill_ranks(cluster, job, 2, 1, saved=SAVED)
        job.wait(60)
    cluster.wait_for_flusher()
    with cluster.start(2, *RUN) as job:
        job.succeed(120)
    cluster.wait_for_flusher()
    check_files(store)
    assert {path.name for path in store.glob("*.pt")} == {
        "step-000000003.pt",
        "step-000000007.pt",
        "step-000000011-a002.pt",
    }
    assert load(cluster.out(2) / "final-0.pt")["start"] == SAVED + 1


def test_a_killed_run_without_ulfm_continues_bit_for_bit(local: Cluster, reference: Path) -> None:
    check_killed_and_continued(local, reference, ulfm=False)
