"""A job of infra/slurm/holdfast.sbatch on a Slurm of three nodes: submits it, waits for it, checks its leftovers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.verification import verify_file
from holdfast.store import open_store
from tests.hosts import job
from tests.hosts.cluster import EVERY, PAUSE_AT, STAGER, STEPS, Cluster
from tests.hosts.host import Host
from tests.slurm.slurm import SCRIPT, Slurm
from tests.support.cluster import wait_until

_SECONDS_MAX = 200.0
_PACE_SECONDS, SLOW_STEPS, _SLOW_EVERY = 0.3, 160, 80

_SETTINGS = {
    "HOLDFAST_CHUNK_BYTES": "256KiB",
    "HOLDFAST_RING_BYTES": "32MiB",
    "HOLDFAST_KEEP_LAST": "0",
    "HOLDFAST_WATCH_GRACE_SECONDS": "10",
}


class Story:
    """A Slurm of three nodes, and one job of the script on it."""

    def __init__(self, cluster: Cluster, slurm: Slurm) -> None:
        self.cluster, self.slurm = cluster, slurm
        self.number = 0

    def submit(self, *options: str, script: Path = SCRIPT, nodes: int = 2, trainer: tuple[str, ...]) -> None:
        """Submit the script, with one rank on each node; `trainer`: the ranks' command."""
        settings: Mapping[str, str] = {**_SETTINGS, "HOLDFAST_LOGS": str(self.cluster.directory / "logs")}
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in settings.items())])
        self.number = self.slurm.submit(
            *(f"--nodes={nodes}", "--ntasks-per-node=1", f"--export={exported}", *options),
            script=[str(script), self.cluster.store, sys.executable, *trainer],
        )

    def train(self, *options: str, nodes: int = 2) -> None:
        """Submit the job of tests/hosts, whose first attempt pauses in mid-run."""
        words = (job.__file__, self.cluster.directory, STEPS, EVERY, 0, PAUSE_AT)
        self.submit(*options, nodes=nodes, trainer=tuple(map(str, words)))

    def train_slowly(self, *options: str) -> None:
        """The same with a pace in its first attempt, which is told to end long before its first checkpoint is due."""
        words = (job.__file__, self.cluster.directory, SLOW_STEPS, _SLOW_EVERY, _PACE_SECONDS, -1)
        self.submit(*options, trainer=tuple(map(str, words)))

    def until(self, what: Callable[[], object], message: str) -> None:
        """Wait until the condition holds; at the limit fail with the job's story."""
        try:
            wait_until(lambda: bool(what()), _SECONDS_MAX, message)
        except AssertionError as error:
            pytest.fail(f"{error}\n{self.slurm.story(self.number)}")

    def until_paused(self) -> None:
        """Wait until the first attempt pauses, some steps after a durable step."""
        saved = PAUSE_AT // EVERY * EVERY - 1
        self.until(
            lambda: [e for e in self.cluster.events("durable") if e["step"] == saved], "nothing durable"
        )
        self.until((self.cluster.out(1) / "paused-0").exists, "no pause")

    def steps_done(self, attempt: int = 1) -> int:
        """Steps that rank 0 of this attempt has done."""
        path = self.cluster.out(attempt) / "losses-0"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def launched(self, attempt: int) -> list[str]:
        """The hosts of an attempt; none if it was not launched."""
        found = [line["hosts"] for line in self.cluster.status("launched") if line["attempt"] == attempt]
        return list(found[0]) if found else []

    def start_now(self) -> None:
        """Start a requeued job at once; Slurm would wait two minutes."""
        self.slurm.until(self.number, "PENDING")
        self.slurm.said("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def check_ended_well(self, *, restarts: int, steps: int = STEPS) -> None:
        """Check: COMPLETED; every checkpoint is whole, the last step's too; no process, ring or segment is left."""
        self.slurm.until(self.number, "COMPLETED", _SECONDS_MAX)
        said = self.slurm.job(self.number)
        assert (said["ExitCode"], said["Restarts"]) == ("0:0", str(restarts))
        assert steps - 1 in self.check_checkpoints()
        self.check_nothing_left()

    def check_checkpoints(self) -> set[int]:
        """Steps in the store. Every byte of each is read and checked."""
        items = Catalog(open_store(self.cluster.store)).list()
        for item in items:
            assert item.manifest is not None, f"{item.name}: {item.fault}"
            report = verify_file(open_store(self.cluster.store), item.manifest)
            assert report.ok, report.summary()
        return {item.step for item in items}

    def check_nothing_left(self) -> None:
        """Check that running hosts have no processes but Slurm's, and no ring or segment."""
        self.until(lambda: not self.running(), f"still runs: {self.running()}")
        assert not self.in_memory()

    def running(self) -> list[str]:
        """Processes on the hosts, except Slurm's."""
        return [line for host in self._up() for line in host.commands() if "slurm" not in line]

    def in_memory(self) -> list[str]:
        """Files in /dev/shm of the hosts."""
        paths = [path for host in self._up() for path in host.file("/dev/shm").rglob("*")]
        return [path.name for path in paths if not path.is_dir()]

    def _up(self) -> list[Host]:
        hosts = [self.cluster.host(name) for name in (STAGER, *self.slurm.names)]
        return [host for host in hosts if host.pids()]
