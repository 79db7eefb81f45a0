"""Errors as the user of a job sees them: one correct sentence, once, at once, and an exit code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import ConfigError, StoreError
from holdfast.store import open_store
from tests.integration.jobs import story
from tests.support.cluster import Cluster, assert_nothing_left
from tests.support.job import HOLDFAST, environment

pytestmark = [pytest.mark.mpi]
RANKS = 2
SECONDS_MAX = 200


def cluster_on(directory: Path, store: Path, **env: str) -> Cluster:
    return Cluster(directory, str(store), env, script=story.__file__)


def check_said_once(output: str, error: str, *words: str) -> None:
    """The output has one message, from one rank, without a traceback."""
    said = [line for line in output.splitlines() if error in line]
    assert len(said) == 1, output
    assert said[0].startswith(f"holdfast: rank 0: {error}: "), output
    for word in words:
        assert word in said[0], said[0]
    assert output.count("help: holdfast explain") == 1, output
    assert "Traceback" not in output


def test_a_refused_start_reaches_ranks_that_come_late_and_is_the_jobs_exit_code(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("somebody's file")
    cluster = cluster_on(tmp_path, store)
    with cluster.start(RANKS, "late", "2") as job:
        assert job.wait(SECONDS_MAX) == StoreError.exit_code, job.output()
        check_said_once(job.output(), "StoreError", str(store), "Not a directory", "story.py:")
    assert not list(cluster.out(1).iterdir())
    assert_nothing_left(cluster.runtime)


def test_an_exception_that_is_not_holdfasts_is_left_alone(tmp_path: Path) -> None:
    cluster = cluster_on(tmp_path, tmp_path / "store")
    with cluster.start(RANKS, "raises", "2") as job:
        assert job.wait(SECONDS_MAX) == 1, job.output()
        for rank in range(RANKS):
            assert f"[rank{rank}]: Traceback (most recent call last):" in job.output()
            assert f"[rank{rank}]: ValueError: not holdfast's" in job.output()


def test_a_script_that_never_restores_puts_nothing_over_the_checkpoints_of_its_run(tmp_path: Path) -> None:
    """The first save is refused on all ranks, unless the script passes fresh=True; then attempts order the steps."""
    store = tmp_path / "store"
    cluster = cluster_on(tmp_path, store)
    with cluster.start(RANKS, "plain", "2", forked=True) as job:
        job.succeed(SECONDS_MAX)
    cluster.wait_for_flusher()
    before = {path: path.read_bytes() for path in store.glob("step-*")}
    steps = ("step-000000000", "step-000000001")
    assert {path.name for path in before} == {f"{steps[0]}.proof.json"} | {
        f"{step}.{kind}" for step in steps for kind in ("pt", "json")
    }

    with cluster.start(RANKS, "unrestored", "3") as job:
        assert job.wait(SECONDS_MAX) == ConfigError.exit_code, job.output()
        check_said_once(job.output(), "ConfigError", str(store), "2 checkpoints", "restore()", "fresh=True")
    assert not list(cluster.out(2).iterdir())
    cluster.wait_for_flusher()
    assert {path: path.read_bytes() for path in store.glob("step-*")} == before

    with cluster.start(RANKS, "fresh", "1", forked=True) as job:
        job.succeed(SECONDS_MAX)
        assert job.output().count("starts a new training beside them") == 1, job.output()
    cluster.wait_for_flusher()
    newest = Catalog(open_store(str(store))).list()[0].manifest
    assert newest is not None
    assert newest.step == 0
    assert newest.attempt > 1


def test_a_store_on_a_file_system_that_is_not_mounted(tmp_path: Path) -> None:
    """The stager refuses, and `holdfast run` before it starts anything; --create makes the folder anyway."""
    store = tmp_path / "nfs" / "team" / "run"
    env = environment(tmp_path / "runtime")
    stager = [HOLDFAST, "stager", "--store", str(store), "--listen", "127.0.0.1:0"]
    refused = subprocess.run(
        stager, env=env, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert refused.returncode == StoreError.exit_code, refused.stderr
    for words in (str(store), f"no directory {store.parent}", "--create"):
        assert words in " ".join(refused.stderr.split())
    assert not (tmp_path / "nfs").exists()
    command = [HOLDFAST, "run", "-n", "1", "--store", str(store), "--logs", str(tmp_path / "logs"), "--"]
    ran = subprocess.run([*command, "true"], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == StoreError.exit_code, ran.stderr
    assert f"no directory {store.parent}" in ran.stderr
    assert not (tmp_path / "nfs").exists()
    assert not (tmp_path / "logs").exists()
    created = cluster_on(tmp_path, store, HOLDFAST_CREATE="true")
    with created.start(RANKS, "plain", "1", forked=True) as job:
        job.succeed(SECONDS_MAX)
    assert list(store.glob("step-000000000*.pt"))
