"""A cluster that trains on one store, over several jobs, and checks of its files, states and processes.

Cluster.start ─► Job (mpirun) ─► kill_ranks ─► Cluster.start ─► Job: knows only the store's URL
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.ring.directory import runtime_directory
from holdfast.store import open_store
from holdfast.store.retrying import Retrying
from tests.support.forked_job import ForkedJob
from tests.support.job import REPOSITORY, Job, environment

__all__ = [
    "SMALL",
    "Cluster",
    "assert_nothing_left",
    "check_continued",
    "check_loadable",
    "kill_ranks",
    "load",
    "losses",
    "same",
    "wait_until",
]

SMALL = ("--chunk-bytes", "64KiB", "--ring-bytes", "4MiB", "--keep-last", "0")
_FLUSHER_SECONDS_MAX = 10.0
_MAIN_JOB_KEYS = ("model", "optimizer", "scheduler", "data", "rng")


class Cluster:
    """Starts jobs on one store, each with the runtime directory of a machine of its own.

    Args:
        directory: For logs, runtime directories and the ranks' output.
        store: URL of the run.
        env: Added to the environment of every process.
        script: The training script. Its arguments are its output directory and the arguments of `start`.
        stager: Settings of the stager, beside the store.
        forked: Fork the ranks from one process, beside a stager that listens on TCP: for tests whose subject does not
            depend on the launcher. Such a job costs a quarter of mpirun's.

    Attributes:
        started: How many jobs were started so far.
    """

    def __init__(
        self,
        directory: Path,
        store: str,
        env: dict[str, str],
        *,
        script: str,
        stager: Sequence[str] = SMALL,
        forked: bool = False,
    ) -> None:
        self.directory, self.store, self._env = directory, store, env
        self._script, self._stager, self._forked, self.started = script, stager, forked, 0
        self._last: Job | None = None

    def start(
        self,
        ranks: int,
        *arguments: str,
        ulfm: bool = True,
        stager: bool = True,
        runtime: Path | None = None,
        rewrite: Callable[[list[str]], list[str]] = list,
        env: Mapping[str, str] | None = None,
        forked: bool | None = None,
    ) -> Job:
        """Start a fresh cluster: only the store remains of the last one. `runtime`: use this machine's directory
        instead. `rewrite` changes the mpirun line; `env` and `forked` are for this start alone.
        """
        is_forked = self._forked if forked is None else forked
        if runtime is None and self._last is not None and self._last.process.poll() is not None:
            self._await_last_flusher()
        self.started += 1
        name = f"cluster-{self.started}"
        self.runtime = runtime or self.directory / f"runtime-{self.started}"
        make = ForkedJob if is_forked else Job
        self._last = make(
            ranks,
            [self._script, str(self.directory / name), *arguments],
            ["--store", self.store, *self._stager] if stager else None,
            env=environment(self.runtime, **{**self._env, **(env or {})}),
            log=self.directory / f"{name}.log",
            ulfm=ulfm,
            rewrite=rewrite,
        )
        return self._last

    def _await_last_flusher(self) -> None:
        """The flusher of a killed job ends a moment after its stager, and owns the run until then."""
        pid_file = runtime_directory(self.store, self.runtime) / "flusher.pid"
        deadline = time.monotonic() + _FLUSHER_SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                pid = int(pid_file.read_text())
            except (FileNotFoundError, ValueError):  # it has ended, or has just made the file
                return
            if not psutil.pid_exists(pid):
                return
            time.sleep(0.05)

    def out(self, number: int) -> Path:
        """Where the ranks of start `number` write."""
        return self.directory / f"cluster-{number}"

    def wait_for_flusher(self, seconds_max: float = 120) -> None:
        """Wait until the flusher of the last start has ended by itself and removed its ring."""
        directory = runtime_directory(self.store, self.runtime)
        wait_until(lambda: not directory.exists(), seconds_max, f"{directory} is still there")


def wait_until(condition: Callable[[], bool], seconds_max: float, message: str | Callable[[], str]) -> None:
    """Poll until the condition holds; at the limit the test fails. A `message` that is a function is called only then,
    to show the output of that time.
    """
    deadline = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < deadline, message() if callable(message) else message
        time.sleep(0.05)


def kill_ranks(cluster: Cluster, job: Job, ranks: int, number: int, *, saved: int) -> None:
    """SIGKILL every training rank, by its own pid, once it pauses in mid-run and step `saved` is in the store."""
    out = cluster.out(number)
    store = cast(Retrying, open_store(cluster.store))
    catalog = Catalog(store)

    def ready() -> bool:
        assert job.process.poll() is None, job.output()
        paused = all((out / f"paused-{rank}").exists() for rank in range(ranks))
        return paused and any(item.step == saved for item in catalog.list())

    try:
        wait_until(ready, 120, lambda: f"no pause with step {saved} in the store:\n{job.output()}")
    finally:
        store.close()
    for rank in range(ranks):
        os.kill(int((out / f"pid-{rank}").read_text()), signal.SIGKILL)


def same(first: Any, second: Any) -> bool:
    """Whether types, keys and tensors are equal, bit for bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and _bytes_of(first).equal(_bytes_of(second))
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def load(path: Path) -> Any:
    """Load a published file."""
    return torch.load(path, weights_only=True)


def losses(path: Path) -> dict[int, Any]:
    """The lines that a rank of the main job wrote, by step."""
    return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}


def check_continued(
    reference: Path, cluster: Cluster, killed: int, resumed: int, *, start: int, steps: int
) -> None:
    """Check that two starts of the main job, the second from step `start`, equal the uninterrupted run, bit for bit."""
    for rank in range(2):
        final = load(cluster.out(resumed) / f"final-{rank}.pt")
        assert final["start"] == start, "it did not resume from the newest checkpoint"
        expected = load(reference / f"final-{rank}.pt")
        assert same({**final, "start": 0}, expected), "the final state differs from the uninterrupted run's"
        want = losses(reference / f"losses-{rank}")
        before = losses(cluster.out(killed) / f"losses-{rank}")
        after = losses(cluster.out(resumed) / f"losses-{rank}")
        assert set(after) == set(range(start, steps)), "the resumed run took other steps"
        assert {**before, **after} == want, "losses or samples differ from the uninterrupted run's"


def check_loadable(files: Iterable[Path]) -> None:
    """Check that every file of the main job opens in a process that cannot import holdfast, and is a sound zip file."""
    code = """
import sys, zipfile
sys.path[:] = [p for p in sys.path if p != sys.argv[1]]
for name in ("holdfast", "trainer_side", "stager", "flusher", "operator_side"):
    sys.modules[name] = None
try:
    import holdfast
except ImportError:
    pass
else:
    sys.exit("holdfast can be imported: the check would prove nothing")
import torch
keys = sys.argv[2].split()
for path in sys.argv[3:]:
    a = torch.load(path, weights_only=True)
    b = torch.load(path, weights_only=True, mmap=True)
    assert list(a) == list(b) == keys, list(a)
    assert zipfile.ZipFile(path).testzip() is None, path
"""
    paths = [str(path) for path in files]
    assert paths, "there is no file to check"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(REPOSITORY), " ".join(_MAIN_JOB_KEYS), *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def assert_nothing_left(runtime: Path, seconds_max: float = 60) -> None:
    """Check that no process, ring, socket or journal is left on the machine that `runtime` stands for."""
    wait_until(lambda: not _processes(runtime), seconds_max, lambda: f"still there: {_processes(runtime)}")
    assert not [path for path in runtime.rglob("*") if not path.is_dir()]


def _processes(runtime: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOLDFAST_RUNTIME_DIR") == str(runtime):
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
