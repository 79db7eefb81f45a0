"""A standing stager, and jobs with the main job's script that join it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integration.jobs import train
from tests.support.cluster import Cluster, wait_until
from tests.support.events import read_events
from tests.support.job import Job
from tests.support.main_job import SAVED
from tests.support.standing_stager import StandingProcess
from tests.support.torchrun import by_torchrun

__all__ = ["RANKS", "Scene"]

RANKS = 2


class Scene:
    """A standing stager, and jobs that join it one after the other."""

    def __init__(self, directory: Path, stager: StandingProcess, key: str) -> None:
        self.directory, self.stager = directory, stager
        self.env = {
            "HOLDFAST_STAGER": stager.address,
            "HOLDFAST_KEY": key,
            "HOLDFAST_EVENTS": str(directory / "events"),
        }
        self.cluster = Cluster(directory, str(directory / "store"), self.env, script=train.__file__)

    def start(
        self, arguments: Sequence[str], *, torchrun: bool = False, restarts: int = 0, **env: str
    ) -> Job:
        """Start a job; under torchrun if asked for, or if `restarts` is set."""
        if not torchrun and not restarts:
            return self.cluster.start(RANKS, *arguments, stager=False, env=env, forked=True)
        rewrite = by_torchrun(RANKS, restarts=restarts)
        return self.cluster.start(RANKS, *arguments, stager=False, rewrite=rewrite, env=env)

    def pid(self, rank: int) -> int:
        return int((self.cluster.out(1) / f"pid-{rank}").read_text())

    def wait_for_pause(self, job: Job) -> None:
        """Wait until all ranks pause, and step SAVED is in the store."""

        def ready() -> bool:
            assert job.process.poll() is None, job.output()
            paused = all((self.cluster.out(1) / f"paused-{rank}").exists() for rank in range(RANKS))
            return paused and any((self.directory / "store").glob(f"step-{SAVED:09d}*.json"))

        wait_until(ready, 240, lambda: f"no pause with step {SAVED} in the store:\n{job.output()}")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [line for line in read_events(self.directory / "events") if line["event"] in kinds]

    def restores(self) -> list[dict[str, Any]]:
        return self.events("restore")
