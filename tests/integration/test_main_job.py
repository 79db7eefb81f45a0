"""The main job on real parts: trained, killed, started again as a fresh cluster that knows only the store's URL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.catalog import Catalog
from holdfast.manifest import State
from holdfast.runtime import runtime_directory
from holdfast.storage import open_store
from tests.integration.jobs import train
from tests.support.job import REPOSITORY, Job, environment

pytestmark = [pytest.mark.mpi]
STEPS, EVERY, PAUSE_AT, SAVED = 14, 4, 9, 7
STAGER = ("--chunk-bytes", "64KiB", "--ring-bytes", "4MiB", "--keep-last", "0")


class Cluster:
    """Starts jobs on one store, each with a runtime directory that only its own machine would have."""

    def __init__(self, directory: Path, store: str, env: dict[str, str]) -> None:
        self.directory, self.store, self._env, self._started = directory, store, env, 0

    def start(self, ranks: int, *arguments: str, ulfm: bool = True) -> Job:
        """A fresh cluster: nothing is left of the one before but the store."""
        self._started += 1
        name = f"cluster-{self._started}"
        self.runtime = self.directory / f"runtime-{self._started}"
        return Job(
            ranks,
            [train.__file__, str(self.directory / name), str(STEPS), str(EVERY), *arguments],
            ["--store", self.store, *STAGER],
            env=environment(self.runtime, **self._env),
            log=self.directory / f"{name}.log",
            ulfm=ulfm,
        )

    def out(self, number: int) -> Path:
        """Where the ranks of start `number` write."""
        return self.directory / f"cluster-{number}"

    def wait_for_flusher(self, seconds_max: float = 60) -> None:
        """Until the flusher of the last start has ended by itself and taken its ring away."""
        directory = runtime_directory(self.store, self.runtime)
        wait_until(lambda: not directory.exists(), seconds_max, f"{directory} is still there")


def wait_until(condition: Callable[[], bool], seconds_max: float, message: str) -> None:
    deadline = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


def kill_ranks(cluster: Cluster, job: Job, ranks: int, number: int) -> None:
    """SIGKILL every training rank, by its own pid, once it stands still in mid-run and step 7 is in the store."""
    out = cluster.out(number)
    catalog = Catalog(open_store(cluster.store))

    def ready() -> bool:
        assert job.process.poll() is None, job.output()
        paused = all((out / f"paused-{rank}").exists() for rank in range(ranks))
        return paused and any(item.step == SAVED for item in catalog.list())

    wait_until(
        ready,
        120,
        f"the ranks did not come to step {PAUSE_AT} with step {SAVED} in the store:\n{job.output()}",
    )
    for rank in range(ranks):
        os.kill(int((out / f"pid-{rank}").read_text()), signal.SIGKILL)


def same(first: Any, second: Any) -> bool:
    """Equal to the bit, in types, keys and tensors."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(second.contiguous().view(-1).view(torch.uint8))
            if first.dim()
            else first.dtype == second.dtype and first.item() == second.item()
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def losses(path: Path) -> dict[int, Any]:
    return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def local(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, str(tmp_path / "store"), {})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training, never interrupted."""
    directory = tmp_path_factory.mktemp("reference")
    cluster = Cluster(directory, str(directory / "store"), {})
    with cluster.start(2) as job:
        job.succeed(120)
    return cluster.out(1)


def check_continued(reference: Path, cluster: Cluster, killed: int, resumed: int) -> None:
    for rank in range(2):
        final = load(cluster.out(resumed) / f"final-{rank}.pt")
        assert final["start"] == SAVED + 1, "it did not resume from the newest checkpoint"
        expected = load(reference / f"final-{rank}.pt")
        assert same({**final, "start": 0}, expected), "the final state differs from the uninterrupted run's"
        want = losses(reference / f"losses-{rank}")
        before = losses(cluster.out(killed) / f"losses-{rank}")
        after = losses(cluster.out(resumed) / f"losses-{rank}")
        assert set(after) == set(range(SAVED + 1, STEPS)), "the resumed run took other steps"
        assert {**before, **after} == want, "losses or samples differ from the uninterrupted run's"


def check_files(store: Path) -> None:
    """Every published file opens without holdfast; nothing partial is to be seen."""
    files = sorted(store.glob("*.pt"))
    assert files
    assert {path.name for path in store.iterdir()} == {
        ".holdfast",
        *(path.name for path in files),
        *(path.with_suffix(".json").name for path in files),
    }
    assert not [path for path in (store / ".holdfast").rglob("*") if path.is_file() and path.parent.name == "tmp"]
    code = """
import sys, zipfile
sys.path[:] = [p for p in sys.path if p != sys.argv[1]]
for name in ("holdfast", "trainer_side", "stager", "flusher"):
    sys.modules[name] = None
try:
    import holdfast
except ImportError:
    pass
else:
    sys.exit("holdfast can be imported: the check would prove nothing")
import torch
for path in sys.argv[2:]:
    a = torch.load(path, weights_only=True)
    b = torch.load(path, weights_only=True, mmap=True)
    assert list(a) == list(b) == ["model", "optimizer", "scheduler", "data", "rng"], list(a)
    assert zipfile.ZipFile(path).testzip() is None, path
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(REPOSITORY), *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ulfm", [True, False], ids=["ulfm", "no-ulfm"])
def test_a_killed_run_continues_bit_for_bit(local: Cluster, reference: Path, ulfm: bool) -> None:
    with local.start(2, str(PAUSE_AT), ulfm=ulfm) as job:
        kill_ranks(local, job, 2, 1)
        job.wait(60)
    local.wait_for_flusher()
    check_files(Path(local.store))
    with local.start(2) as job:
        job.succeed(120)
    local.wait_for_flusher()
    check_continued(reference, local, 1, 2)
    check_files(Path(local.store))
    items = Catalog(open_store(local.store)).list()
    assert {item.step for item in items} == {3, 7, 11}
    assert all(item.state == State.VERIFIED for item in items)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_world_size_takes_up_the_same_state(local: Cluster, ranks: int) -> None:
    with local.start(2) as job:
        job.succeed(120)
    local.wait_for_flusher()
    newest = load(max(Path(local.store).glob("*.pt")))
    with local.start(ranks) as job:
        job.succeed(120)
    for rank in range(ranks):
        restored = load(local.out(2) / f"restored-{rank}.pt")
        for name in ("model", "optimizer", "scheduler", "data"):
            assert same(restored[name], newest[name]), (rank, name)


def test_a_damaged_checkpoint_is_passed_over_with_the_reason(local: Cluster) -> None:
    with local.start(2) as job:
        job.succeed(120)
    local.wait_for_flusher()
    newest = max(Path(local.store).glob("*.pt"))
    assert newest.name == "step-000000011.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0x10
    newest.write_bytes(content)
    with local.start(2) as job:
        job.succeed(120)
        said = job.output()
    for rank in range(2):
        assert load(local.out(2) / f"final-{rank}.pt")["start"] == SAVED + 1
    assert "11" in said, said
    assert "step 7" in said, said


def test_fsspec_url(tmp_path: Path) -> None:
    """A store that is neither POSIX nor S3 to us: fsspec's own driver for local files."""
    store = tmp_path / "store"
    cluster = Cluster(tmp_path, f"local://{store}", {})
    with cluster.start(2) as job:
        job.succeed(120)
    cluster.wait_for_flusher()
    check_files(store)
    assert len(list(store.glob("*.pt"))) == 3
