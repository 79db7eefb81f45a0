"""The main job on real parts: trained, killed, started again as a fresh cluster that knows only the store's URL."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.image.manifest import State
from holdfast.store import open_store
from holdfast.store.generic import GenericStore
from holdfast.store.retrying import Retrying
from tests.integration.jobs import train
from tests.support.cluster import Cluster, check_continued, check_loadable, kill_ranks, load, same
from tests.support.fsspec_site import sitecustomize  # noqa: F401 - registers the driver here, too
from tests.support.job import REPOSITORY

pytestmark = [pytest.mark.mpi]
STEPS, EVERY, PAUSE_AT, SAVED = 14, 4, 9, 7
RUN = (str(STEPS), str(EVERY))


@pytest.fixture
def local(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, str(tmp_path / "store"), {}, script=train.__file__)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The same training, never interrupted."""
    directory = tmp_path_factory.mktemp("reference")
    cluster = Cluster(directory, str(directory / "store"), {}, script=train.__file__)
    with cluster.start(2, *RUN) as job:
        job.succeed(120)
    cluster.wait_for_flusher()
    return cluster


@pytest.fixture
def reference(finished: Cluster) -> Path:
    """What its ranks wrote."""
    return finished.out(1)


@pytest.fixture
def after(finished: Cluster, local: Cluster) -> Cluster:
    """A fresh cluster whose store holds what the finished one published."""
    shutil.copytree(finished.store, local.store)
    return local


def check_files(store: Path) -> None:
    """Every published file opens without holdfast; nothing partial is to be seen."""
    files = sorted(store.glob("*.pt"))
    assert files
    assert {path.name for path in store.iterdir()} == {
        ".holdfast",
        *(path.name for path in files),
        *(path.with_suffix(".json").name for path in files),
    }
    assert not [
        path for path in (store / ".holdfast").rglob("*") if path.is_file() and path.parent.name == "tmp"
    ]
    check_loadable(files)


@pytest.mark.parametrize("ulfm", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["ulfm", "no-ulfm"])
def test_a_killed_run_continues_bit_for_bit(local: Cluster, reference: Path, ulfm: bool) -> None:
    with local.start(2, *RUN, str(PAUSE_AT), ulfm=ulfm) as job:
        kill_ranks(local, job, 2, 1, saved=SAVED)
        job.wait(60)
    local.wait_for_flusher()
    check_files(Path(local.store))
    with local.start(2, *RUN) as job:
        job.succeed(120)
    local.wait_for_flusher()
    check_continued(reference, local, 1, 2, start=SAVED + 1, steps=STEPS)
    check_files(Path(local.store))
    items = Catalog(open_store(local.store)).list()
    assert {item.step for item in items} == {3, 7, 11}
    assert all(item.state == State.VERIFIED for item in items)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_world_size_takes_up_the_same_state(after: Cluster, ranks: int) -> None:
    newest = load(max(Path(after.store).glob("*.pt")))
    with after.start(ranks, *RUN) as job:
        job.succeed(120)
    for rank in range(ranks):
        restored = load(after.out(1) / f"restored-{rank}.pt")
        for name in ("model", "optimizer", "scheduler", "data"):
            assert same(restored[name], newest[name]), (rank, name)


def test_a_damaged_checkpoint_is_passed_over_with_the_reason(after: Cluster) -> None:
    newest = max(Path(after.store).glob("*.pt"))
    assert newest.name == "step-000000011.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0x10
    newest.write_bytes(content)
    with after.start(2, *RUN) as job:
        job.succeed(120)
        said = job.output()
    for rank in range(2):
        assert load(after.out(1) / f"final-{rank}.pt")["start"] == SAVED + 1
    assert "11" in said, said
    assert "step 7" in said, said


@pytest.mark.soak
def test_any_fsspec_url(tmp_path: Path) -> None:
    """A store that holdfast has no backend for, but fsspec has a driver: killed, and resumed from."""
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
    assert {path.name for path in store.glob("*.pt")} == {f"step-{step:09d}.pt" for step in (3, 7, 11)}
    assert load(cluster.out(2) / "final-0.pt")["start"] == SAVED + 1
