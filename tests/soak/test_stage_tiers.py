"""Nightly. Pipeline stages in local tiers, and torch's interleaved schedule, under which a rank has several stages."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import SMALL, Cluster, kill_ranks, load, same

pytestmark = [pytest.mark.mpi]
# Not imported: torch's modules warn.
_JOB = Path(__file__).parents[1] / "integration" / "jobs" / "virtual_stages.py"
SECONDS_MAX = 240


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in shared memory."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="holdfast-test-"))
    yield directory
    shutil.rmtree(directory)


def restored(cluster: Cluster) -> dict[str, Any]:
    """The report of the last start."""
    found: dict[str, Any] = json.loads((cluster.out(cluster.started) / "restored.json").read_text())
    return found


@pytest.mark.parametrize("kind", ["memory", "nvme", "pm"])
def test_slices_of_stages_come_back_to_the_same_and_to_other_stages(
    kind: str, tmp_path: Path, memory: Path
) -> None:
    truths, store = tmp_path / "truths", tmp_path / "store"
    truths.mkdir()
    place = memory if kind == "memory" else tmp_path / "disk"
    env = {"HOLDFAST_TIERS": f"{kind}:{place}", "HOLDFAST_STORE": str(store)}
    env |= {"PMEM_IS_PMEM_FORCE": "1"} if kind == "pm" else {}  # else, without libpmem, msync
    cluster = Cluster(tmp_path, str(store), env, script=str(_JOB))
    for case, steps in (("gpipe", 2), ("gpipe", 3), ("interleaved", 4)):
        with cluster.start(2, case, str(steps), str(truths), "-1", stager=False) as job:
            job.succeed(SECONDS_MAX)
        if cluster.started > 1:
            found = restored(cluster)
            assert found["step"] == steps - 2
            assert found["differ"] == []
            assert found["sources"] == [env["HOLDFAST_TIERS"]]
    assert not [*store.glob("step-*")]  # no other copy existed


def test_virtual_stages_are_killed_and_resumed_as_if_they_were_not_and_come_back_whole(
    tmp_path: Path,
) -> None:
    ends = []
    for name, pause_at in (("undisturbed", -1), ("killed", 1)):
        truths, store = tmp_path / name / "truths", tmp_path / name / "store"
        truths.mkdir(parents=True)
        env = {"HOLDFAST_ON_FULL": "wait"}
        cluster = Cluster(tmp_path / name, str(store), env, script=str(_JOB), stager=SMALL)
        with cluster.start(2, "interleaved", "4", str(truths), str(pause_at)) as job:
            if pause_at < 0:
                job.succeed(SECONDS_MAX)
            else:
                kill_ranks(cluster, job, 2, 1, saved=pause_at)
                job.wait(SECONDS_MAX)
        cluster.wait_for_flusher()
        if pause_at >= 0:
            with cluster.start(2, "interleaved", "4", str(truths), "-1") as job:
                job.succeed(SECONDS_MAX)
            cluster.wait_for_flusher()
            found = restored(cluster)
            assert (found["step"], found["differ"]) == (pause_at, [])
        (file,) = store.glob("step-000000003*.pt")
        ends.append((load(truths / "3.pt"), load(file)))
    assert same(*(truth for truth, _ in ends))
    assert same(*(saved for _, saved in ends))
    for case, ranks in (("whole", 1), ("gpipe", 2)):
        with cluster.start(ranks, case, "4", str(truths), "-1") as job:
            job.succeed(SECONDS_MAX)
        cluster.wait_for_flusher()
        found = restored(cluster)
        assert (found["step"], found["differ"]) == (3, []), case
