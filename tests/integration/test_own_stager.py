"""The main job with a stager of its own: alone, under torchrun and mpirun; ranks, job and stager killed; refusals.

The reference for the resumed runs was made under mpirun, with a stager in the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.net.key import new_key
from holdfast.store import open_store
from tests.integration.jobs import train
from tests.support.cluster import (
    Cluster,
    check_continued,
    check_loadable,
    load,
    losses,
    same,
    wait_until,
)
from tests.support.events import read_events
from tests.support.job import Job, environment
from tests.support.main_job import EVERY, PAUSE_AT, RUN, SAVED, STEPS
from tests.support.standing_stager import standing_stager
from tests.support.torchrun import by_torchrun

pytestmark = [pytest.mark.mpi]
RANKS = 2
NEVER, MANY = 10_000, 100_000
NEWEST = STEPS // EVERY * EVERY - 1
RING = "the stager's ring"


class Place:
    """One machine, on which jobs of one run start their own stagers."""

    def __init__(self, directory: Path, launcher: str = "torchrun") -> None:
        self.directory, self.launcher, self.ranks = directory, launcher, 1 if launcher == "alone" else RANKS
        self.runtime, self.store = directory / "runtime", directory / "store"
        self.env = {
            "HOLDFAST_STAGER": "own",
            "HOLDFAST_STORE": str(self.store),
            "HOLDFAST_CHUNK_BYTES": "64KiB",
            "HOLDFAST_RING_BYTES": "4MiB",
            "HOLDFAST_KEEP_LAST": "0",
            "HOLDFAST_EVENTS": str(directory / "events"),
        }
        self.cluster = Cluster(directory, str(self.store), self.env, script=train.__file__)

    def start(self, arguments: Sequence[str], *, restarts: int = 0, **env: str) -> Job:
        def rewrite(line: list[str]) -> list[str]:
            if self.launcher == "torchrun":
                return by_torchrun(RANKS, restarts=restarts)(line)
            return line if self.launcher == "mpirun" else line[line.index(sys.executable) :]

        return self.cluster.start(
            self.ranks, *arguments, stager=False, runtime=self.runtime, rewrite=rewrite, env=env
        )

    def wait_for_pause(self, job: Job, number: int = 1) -> None:
        """Wait until all ranks pause, and step SAVED is in the store."""
        out = self.cluster.out(number)

        def ready() -> bool:
            assert job.process.poll() is None, job.output()
            paused = all((out / f"paused-{rank}").exists() for rank in range(self.ranks))
            return paused and any(self.store.glob(f"step-{SAVED:09d}*.json"))

        wait_until(ready, 240, lambda: f"no pause with step {SAVED} in the store:\n{job.output()}")

    def kill_ranks(self) -> None:
        for rank in range(self.ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), signal.SIGKILL)

    def pid(self, rank: int) -> int:
        return int((self.cluster.out(1) / f"pid-{rank}").read_text())

    def stagers(self) -> list[int]:
        """Return the pids of the stagers on this machine."""
        return [process.pid for process in processes(self.runtime) if "--own" in process.cmdline()]

    def wait_until_empty(self) -> None:
        """Wait until stager and flusher have ended by themselves, and the ring is gone."""
        wait_until(lambda: not list(self.runtime.glob("*")), 120, lambda: f"left: {processes(self.runtime)}")
        wait_until(lambda: not processes(self.runtime), 60, lambda: f"left: {processes(self.runtime)}")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [line for line in read_events(self.directory / "events") if line["event"] in kinds]

    def states(self) -> dict[int, str]:
        return {item.step: item.state for item in Catalog(open_store(str(self.store))).list()}

    def own_log(self) -> str:
        logs = (self.directory / "runtime-logs" / "holdfast").glob("stager-*.log")
        return "".join(log.read_text() for log in logs)

    def end(self) -> None:
        for process in processes(self.runtime):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def processes(runtime: Path) -> list[psutil.Process]:
    """Return the stagers and flushers with this runtime directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            is_ours = process.environ().get("HOLDFAST_RUNTIME_DIR") == str(runtime)
            if is_ours and {"stager", "flusher"} & set(process.cmdline()[:5]):
                found.append(process)
    return found


@contextlib.contextmanager
def place(directory: Path, launcher: str = "torchrun") -> Iterator[Place]:
    made = Place(directory, launcher)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_killed_job_leaves_its_stager_and_the_next_start_goes_on_from_the_ring(
    tmp_path: Path, reference: Path, launcher: str
) -> None:
    with place(tmp_path, launcher) as here:
        with here.start([*RUN, str(PAUSE_AT)]) as job:
            here.wait_for_pause(job)
            (stager,) = here.stagers()
            here.kill_ranks()
            job.wait(120)
        assert here.stagers() == [stager], "it died with the ranks"
        with here.start(RUN) as job:
            job.succeed(240)
        check_continued(reference, here.cluster, 1, 2, start=SAVED + 1, steps=STEPS)
        restores = here.events("restore")
        assert [event["step"] for event in restores] == [SAVED] * RANKS
        assert all(set(event["sources"]) == {RING} for event in restores), restores
        here.wait_until_empty()
        assert here.states()[NEWEST] == "verified"
        check_loadable(sorted(here.store.glob("step-*.pt")))


def test_torchrun_restarts_a_killed_rank_0_and_the_ranks_find_the_stager_that_it_has_started(
    tmp_path: Path, reference: Path
) -> None:
    with place(tmp_path) as here:
        with here.start([*RUN, str(PAUSE_AT)], restarts=1) as job:
            here.wait_for_pause(job)
            stagers = here.stagers()
            (here.cluster.out(1) / "go-on").touch()  # for the ranks of the second start
            os.kill(here.pid(0), signal.SIGKILL)
            wait_until(lambda: here.events("restore") != [], 240, job.output)
            assert here.stagers() == stagers
            job.succeed(240)
        for rank in range(RANKS):
            final = load(here.cluster.out(1) / f"final-{rank}.pt")
            assert final["start"] == SAVED + 1
            assert same({**final, "start": 0}, load(reference / f"final-{rank}.pt"))
            assert losses(here.cluster.out(1) / f"losses-{rank}") == losses(reference / f"losses-{rank}")
        here.wait_until_empty()


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_killed_stager_is_started_again_and_the_job_goes_on_to_its_last_checkpoint(
    tmp_path: Path, reference: Path, launcher: str
) -> None:
    with place(tmp_path, launcher) as here:
        with here.start([*RUN, str(PAUSE_AT)], HOLDFAST_RECONNECT_SECONDS_MAX="1") as job:
            here.wait_for_pause(job)
            os.kill(here.stagers()[0], signal.SIGKILL)
            wait_until(lambda: len(here.events("stager_back")) == RANKS, 120, job.output)
            (here.cluster.out(1) / "go-on").touch()
            job.succeed(240)
            said = job.output()
        assert said.count("the stager that rank 0 has started has died; it is started again") == 1, said
        assert (
            said.count("the stager is lost, and no checkpoints are taken until it is reached again") == RANKS
        )
        for rank in range(RANKS):
            assert same(
                load(here.cluster.out(1) / f"final-{rank}.pt"), load(reference / f"final-{rank}.pt")
            ), "a lost stager has changed the training"
        here.wait_until_empty()
        assert here.states()[NEWEST] == "verified"


def test_a_process_by_itself_saves_at_sigterm_although_its_stager_got_it_too(tmp_path: Path) -> None:
    with place(tmp_path, "alone") as here:
        with here.start([str(MANY), str(NEVER)], TRAIN_STEP_SECONDS="0.02", HOLDFAST_WATCH="sigterm") as job:
            path = here.cluster.out(1) / "losses-0"
            wait_until(lambda: path.exists() and len(losses(path)) > 5, 240, job.output)
            os.kill(here.stagers()[0], signal.SIGTERM)  # as Slurm tells every process of a job
            os.kill(here.pid(0), signal.SIGTERM)
            wait_until(lambda: bool(here.states()), 120, job.output)
            here.kill_ranks()
            job.wait(60)
        (saved,) = here.states()
        here.wait_until_empty()  # at once: it was told that no further start comes
        with here.start([str(saved + 3), str(NEVER)]) as job:
            job.succeed(240)
        assert [event["step"] for event in here.events("restore")] == [saved]
        here.wait_until_empty()
        assert set(here.states().values()) == {"verified"}


def test_a_stager_whose_job_does_not_come_again_writes_what_is_staged_and_ends(tmp_path: Path) -> None:
    with place(tmp_path, "alone") as here:
        with here.start([*RUN, str(PAUSE_AT)], HOLDFAST_IDLE_SECONDS_MAX="1") as job:
            here.wait_for_pause(job)
            here.kill_ranks()
            job.wait(60)
        here.wait_until_empty()
        assert here.states() == {3: "verified", SAVED: "verified"}


def test_a_stager_that_stays_lost_is_replaced_once_its_flusher_has_no_claim_any_more(
    tmp_path: Path, reference: Path
) -> None:
    key, elsewhere = new_key(), tmp_path / "elsewhere"
    env = environment(elsewhere, HOLDFAST_KEY=key)
    with (
        place(tmp_path) as here,
        standing_stager(str(here.store), env, tmp_path / "stager.log") as lost,
    ):
        named = {
            "HOLDFAST_STAGER": lost.address,
            "HOLDFAST_KEY": key,
            "HOLDFAST_ON_STAGER_LOST": "own",
            "HOLDFAST_OWN_AFTER_SECONDS": "1",
            "HOLDFAST_RECONNECT_SECONDS_MAX": "4",
        }
        with here.start([*RUN, str(PAUSE_AT)], restarts=0, **named) as job:
            here.wait_for_pause(job)
            assert here.stagers() == []
            (flusher,) = [one for one in processes(elsewhere) if "flusher" in one.cmdline()]
            flusher.suspend()  # it lives, and so does its claim
            lost.kill()
            wait_until(lambda: "owns this run: process" in here.own_log(), 120, job.output)
            assert not here.events("stager_back")
            flusher.kill()
            wait_until(lambda: len(here.events("stager_back")) == RANKS, 240, job.output)
            (here.cluster.out(1) / "go-on").touch()
            job.succeed(240)
            assert "rank 0 starts one for this job on its machine" in job.output()
        for rank in range(RANKS):
            assert same(load(here.cluster.out(1) / f"final-{rank}.pt"), load(reference / f"final-{rank}.pt"))
        here.wait_until_empty()
        assert here.states()[NEWEST] == "verified"


def test_a_second_job_on_the_same_run_is_refused_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    with place(tmp_path, "alone") as here:
        with here.start([*RUN, str(PAUSE_AT)]) as job:
            here.wait_for_pause(job)
            with here.start(RUN) as second:
                assert second.wait(240) != 0
            said = second.output()
            assert "refuses rank 0: this stager serves another job" in said, said
            (here.cluster.out(1) / "go-on").touch()
            job.succeed(240)
        here.wait_until_empty()
        assert here.states()[NEWEST] == "verified"


def test_starts_that_cannot_work_are_refused_on_all_ranks_by_their_names(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        here.store.write_text("a file")
        with here.start(RUN) as job:
            assert job.wait(240) != 0
        assert job.output().count("StoreError: ") == 1, job.output()
        here.store.unlink()
        with here.start(RUN, HOLDFAST_STORE="") as job:
            assert job.wait(240) != 0
        assert "stager: own, and no store is set for the stager to write to" in job.output()
        with here.start(RUN, HOLDFAST_LISTEN="192.0.2.7:29411") as job:
            assert job.wait(240) != 0
        assert "stager setting listen: 192.0.2.7:29411: Cannot assign requested address" in job.output()
        with here.start(RUN, HOLDFAST_TIERS="store") as job:
            assert job.wait(240) != 0
        assert "instead of the tier store set HOLDFAST_STAGER=own" in " ".join(job.output().split())
        here.wait_until_empty()


def test_a_stager_in_the_mpirun_line_and_one_of_its_own_are_one_too_many(tmp_path: Path) -> None:
    with place(tmp_path, "mpirun") as here, here.cluster.start(RANKS, *RUN) as job:
        assert job.wait(120) != 0
        assert "trainer setting stager: own, and the mpirun line has a stager as well" in job.output()
