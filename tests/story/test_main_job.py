"""The main job in real processes: trained, killed, and resumed by a fresh cluster that knows only the store's URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.image.manifest import State
from holdfast.image.proof_record import proof_name
from holdfast.store import open_store
from tests.integration.jobs import train
from tests.support.cluster import Cluster, check_continued, check_loadable, kill_ranks
from tests.support.fsspec_site import sitecustomize  # noqa: F401 - registers the driver here, too
from tests.support.main_job import PAUSE_AT, RUN, SAVED, STEPS

pytestmark = [pytest.mark.mpi]


@pytest.fixture
def local(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, str(tmp_path / "store"), {}, script=train.__file__)


def check_files(store: Path) -> None:
    """Every published file opens without holdfast; no partial file is visible."""
    files = sorted(store.glob("*.pt"))
    assert files
    proofs = {proof_name(path.name) for path in files}  # of the steps that a job has lived to take
    assert {path.name for path in store.iterdir()} - proofs == {
        ".holdfast",
        *(path.name for path in files),
        *(path.with_suffix(".json").name for path in files),
    }
    assert not [
        path for path in (store / ".holdfast").rglob("*") if path.is_file() and path.parent.name == "tmp"
    ]
    check_loadable(files)


def test_a_killed_run_continues_bit_for_bit(local: Cluster, reference: Path) -> None:
    check_killed_and_continued(local, reference, ulfm=True)


def check_killed_and_continued(local: Cluster, reference: Path, *, ulfm: bool) -> None:
    """Kill all ranks in mid-run, restart, compare with the uninterrupted run."""
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
