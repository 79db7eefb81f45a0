"""`holdfast run` on real jobs: killed and restarted automatically, stopped by a bug, ended by a signal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.ring.directory import runtime_directory
from holdfast.store import open_store
from tests.integration.jobs import buggy, poisoned, supervised, train
from tests.support.cluster import SMALL, Cluster, check_continued, wait_until
from tests.support.events import read_events
from tests.support.job import REPOSITORY, environment
from tests.support.main_job import EVERY, PAUSE_AT, SAVED, STEPS
from tests.support.post_server import SECRET, PostServer

pytestmark = [pytest.mark.mpi]
SECONDS_MAX = 250.0
FILE_BYTES_MAX = 16 << 10  # claims and manifests fit, parts do not
RING = "the stager's ring"
SETTINGS = [
    f"--set={name.removeprefix('--')}={value}" for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)
]


class Run:
    """One `holdfast run` in a separate process; all its processes end with the test."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.folder = directory, directory / "store"
        self.store = str(self.folder)
        self.logs, self.runtime = directory / "logs", directory / "runtime"
        self.cluster = Cluster(directory / "out", self.store, {}, script=train.__file__)
        self._said = directory / "said"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, *command: str, ranks: int = 2, options: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> None:
        line = [
            *(
                sys.executable,
                "-m",
                "holdfast",
                "run",
                "-n",
                str(ranks),
                "--store",
                self.store,
                "--logs",
                str(self.logs),
            ),
            *(*SETTINGS, *options, "--", sys.executable, *command),
        ]
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(
                line,
                stdout=said,
                stderr=said,
                env=environment(self.runtime, HOLDFAST_EVENTS=str(self.logs / "events.jsonl"), **(env or {})),
                start_new_session=True,
            )

    def main_job(self, **more: Any) -> None:
        """Start the main job, whose results are compared bit for bit."""
        self.start(
            supervised.__file__, str(self.directory / "out"), str(STEPS), str(EVERY), str(PAUSE_AT), **more
        )

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def status(self, event: str = "") -> list[dict[str, Any]]:
        return [line for line in read_events(self.logs / "status.jsonl") if event in {"", line["event"]}]

    def wait(self) -> int:
        assert self.process is not None
        try:
            return self.process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end; it said:\n{self.said()}\n{self.status()}")

    def pause(self, level: str = "durable", *, ranks: int = 2) -> None:
        """Wait until every rank of the first attempt pauses, with a step that is `durable`, or `staged`."""

        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.said()
            paused = all((self.cluster.out(1) / f"paused-{rank}").exists() for rank in range(ranks))
            events = read_events(self.logs / "events.jsonl")
            return paused and any((line["event"], line.get("step")) == (level, SAVED) for line in events)

        wait_until(ready, SECONDS_MAX, "the job did not come to its pause")

    def flusher(self) -> psutil.Process:
        """Wait for this run's flusher to have a ring; return its process."""
        directory = runtime_directory(self.store, self.runtime)
        wait_until((directory / "flusher.sock").exists, SECONDS_MAX, "no flusher")
        return psutil.Process(int((directory / "flusher.pid").read_text()))

    def restored_from(self) -> list[tuple[int, set[str]]]:
        """Return step and sources of each rank's restore."""
        said = [line for line in read_events(self.logs / "events.jsonl") if line["event"] == "restore"]
        return [(line["step"], set(line["sources"])) for line in said]

    def pid(self, rank: int) -> int:
        return int((self.cluster.out(1) / f"pid-{rank}").read_text())

    def job(self, wanted: Callable[[list[str]], bool]) -> list[int]:
        """Return the pids of the job's processes with a matching command line."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if wanted(child.cmdline())]

    def living(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("HOLDFAST_RUNTIME_DIR") == str(self.runtime)
                    and process.status() != "zombie"
                ):
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def assert_nothing_left(self) -> None:
        """Assert that no process, ring, MPI segment or upload is left."""
        # The flusher gives its directory back just before it ends.
        wait_until(lambda: not self.living(), SECONDS_MAX, lambda: f"still there: {self.living()}")
        assert not runtime_directory(self.store, self.runtime).exists()
        assert not list(self.runtime.glob("*-mpi-*"))
        assert not [
            p for p in (self.folder / ".holdfast").rglob("*") if p.is_file() and p.parent.name == "tmp"
        ]

    def close(self) -> None:
        for line in self.living():
            os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    try:
        yield made
    finally:
        made.close()


def check_resumed(run: Run, reference: Path, cause: str) -> None:
    assert run.wait() == 0, run.said()
    assert [(line["attempt"], line["cause"]) for line in run.status("ended")] == [(1, cause), (2, "done")], (
        run.status()
    )
    check_continued(reference, run.cluster, 1, 2, start=SAVED + 1, steps=STEPS)
    assert [(line["attempt"], line["step"]) for line in run.status("restored")] == [(1, -1), (2, SAVED)]
    assert [(line["attempt"], line["step"]) for line in run.status("training")] == [(1, 0), (2, SAVED + 1)]
    run.assert_nothing_left()


def test_a_job_whose_ranks_are_killed_goes_on_by_itself(run: Run, reference: Path) -> None:
    """All is durable, and the flusher's grace is over at once: the ring is there all the same. People are told."""
    told = run.directory / "told"
    with contextlib.closing(PostServer()) as people:
        run.main_job(
            options=("--no-ulfm", "--notify-command", f'echo "$HOLDFAST_EVENT" >> {told}'),
            env={"HOLDFAST_GRACE_SECONDS": "0", "HOLDFAST_NOTIFY": people.url},
        )
        run.pause()
        for rank in range(2):
            os.kill(run.pid(rank), signal.SIGKILL)
        check_resumed(run, reference, "killed")
        said = {one["event"]: one for one in people.said()}
    assert "was killed by SIGKILL from outside" in said["killed"]["text"]
    assert f"step {SAVED + 1} is done" in said["resumed"]["text"]
    assert (said["over"]["title"], said["over"]["run"]) == ("done", run.store)
    assert {"killed", "resumed", "over"} <= set(told.read_text().split()) <= set(said)
    assert not {"lost", "job_ended"} & set(said), "the stager sends none of its own"
    assert "notifications go to http://127.0.0.1/…, --notify-command" in run.said()
    assert SECRET not in run.said()
    assert "was killed by SIGKILL from outside" in run.said()
    assert run.restored_from() == [(SAVED, {RING})] * 2


def test_a_job_with_two_stagers_goes_on_from_both_rings(run: Run, reference: Path) -> None:
    run.main_job(options=("--stagers", "2", "--set=chunk_bytes=8KiB"))
    run.pause()
    for rank in range(2):
        os.kill(run.pid(rank), signal.SIGKILL)
    check_resumed(run, reference, "killed")
    assert run.restored_from() == [(SAVED, {RING})] * 2
    manifests = [path.with_suffix(".json") for path in run.folder.glob("step-*.pt")]
    writers = [json.loads(path.read_text())["record"]["flusher"] for path in manifests]
    assert {writer["shares"] for writer in writers} == {2}, (
        "a stager wrote all of it, so the ring of one is enough"
    )
    assert not runtime_directory(run.store, run.runtime, share=1).exists()


def test_a_rank_that_is_killed_with_its_wrapper_is_no_bug(run: Run, reference: Path) -> None:
    """As when a container or a pod is killed: nobody is left to report it but the stager."""
    run.main_job()
    run.pause()
    wrapper = psutil.Process(run.pid(1)).parent()
    assert wrapper is not None
    assert "operator_side.supervise.rank" in wrapper.cmdline()
    wrapper.kill()
    check_resumed(run, reference, "killed")
    assert "died together with the process that reports its end" in run.said()


def check_a_step_not_yet_in_the_store_is_restored_from_the_ring(run: Run, reference: Path) -> None:
    """With ULFM, so the stager lives; it does not wait for the store once its ranks are lost."""
    site = REPOSITORY / "tests" / "support" / "fsspec_site"
    run.store = f"elsewhere://{run.folder}"
    run.main_job(env={"PYTHONPATH": f"{site}{os.pathsep}{REPOSITORY}"})
    flusher = run.flusher()
    flusher.rlimit(psutil.RLIMIT_FSIZE, (FILE_BYTES_MAX, psutil.RLIM_INFINITY))
    run.pause("staged")
    for rank in range(2):
        os.kill(run.pid(rank), signal.SIGKILL)
    wait_until(lambda: bool(run.status("training")[1:]), SECONDS_MAX, "it did not go on")
    assert not list(run.folder.glob("step-*.json"))
    assert flusher.is_running(), "it is the same one all the time"
    assert not run.status("ending"), "nobody had to end a stager that waited for the store"
    flusher.kill()  # the next one has no such limit, and tries at once: this one waits longer each time
    check_resumed(run, reference, "killed")
    assert run.restored_from() == [(SAVED, {RING})] * 2
    assert sorted(int(path.name[5:14]) for path in run.folder.glob("step-*.pt")) == [3, 7, 11]


def test_an_option_that_mpirun_refuses_ends_the_run(run: Run) -> None:
    run.start(buggy.__file__, "20", "4", "6", options=("--mpirun-options", "--no-such-option"))
    assert run.wait() == 9, run.said()
    assert [line["cause"] for line in run.status("ended")] == ["unlaunched"] * 3
    assert "no-such-option" in run.said(), "mpirun's own words"


def test_a_bug_ends_the_run_and_shows_its_traceback(run: Run) -> None:
    run.start(buggy.__file__, "20", "4", "6")
    assert run.wait() == 1, run.said()
    ended = run.status("ended")
    assert [(line["cause"], line["progressed"]) for line in ended] == [("crashed", True), ("crashed", False)]
    tail = run.said()[-3000:]
    assert "ValueError: the bug of step 6" in tail
    assert "compute(step)" in tail
    assert "the same crash 2 times in a row" in tail
    assert "help: holdfast explain run (" in tail
    assert "rank 1" in tail
    log = run.logs / "attempt-002" / "rank-1.log"
    assert "ValueError: the bug of step 6" in log.read_text()
    assert (
        not (run.logs / "attempt-002" / "rank-0.log").exists()
        or "the bug" not in (run.logs / "attempt-002" / "rank-0.log").read_text()
    )
    run.assert_nothing_left()


def check_a_checkpoint_that_the_job_crashes_on_is_set_aside_and_the_run_ends_well(run: Run) -> None:
    """Attempt 1 saves NaN in step 5; 2 and 3 crash on it; 4 goes back to step 3 and is killed; 5 goes on from there."""
    run.start(poisoned.__file__, "10", "2", "5", "5", options=("--set=keep_last=2",))
    assert run.wait() == 0, run.said()
    causes = [line["cause"] for line in run.status("ended")]
    assert causes == ["crashed", "crashed", "crashed", "killed", "done"], run.status()
    assert [line["step"] for line in run.status("restored")] == [-1, 5, 5, 3, 5]
    restored = [line for line in read_events(run.logs / "events.jsonl") if line["event"] == "restore"]
    assert [(line["attempt"], line["step"]) for line in restored] == [
        key for key in ((1, 5), (1, 5), (1, 3), (4, 5)) for _ in range(2)
    ]
    assert all(RING in line["sources"] for line in restored), "the ring has step 5, too, and is no way around"
    (line,) = run.status("set_aside")
    assert {name: line[name] for name in ("attempt", "step", "of_attempt", "before_step", "crashes")} == {
        "attempt": 3,
        "step": 5,
        "of_attempt": 1,
        "before_step": 3,
        "crashes": 2,
    }
    said = run.said()
    assert "step 5 (attempt 1) is set aside: 2 attempts that were restored from it" in said
    passed = (
        "step 5 (attempt 1) is set aside by the setting restore_set_aside; trying step 3 (attempt 1) instead"
    )
    assert said.count(passed) == 1, "one rank says it for all"
    assert said.count("every weight is 10.0") == 1
    # Retention has removed step 3, which is no longer needed, and not what shows how it came to this.
    kept = {
        item.manifest.order for item in Catalog(open_store(run.store)).list() if item.manifest is not None
    }
    assert (1, 5) in kept
    assert (1, 3) not in kept
    assert {(5, 7), (5, 9)} <= kept
    run.assert_nothing_left()


def test_a_wrong_setting_is_said_once(run: Run) -> None:
    run.start(buggy.__file__, "20", "4", "6", env={"HOLDFAST_IN_FLIGHT_MAX": "0"})
    assert run.wait() == 2, run.said()
    assert len(run.status("launched")) == 1
    assert "in_flight_max" in run.said()[-2000:]
    assert "help: holdfast explain config (" in run.said().splitlines()[-1]
    run.assert_nothing_left()


def test_a_running_job_refuses_a_second_supervisor_hears_sigusr1_and_leaves_nothing_at_sigterm(
    run: Run,
) -> None:
    run.main_job(options=("--grace-seconds", "60"), env={"HOLDFAST_WATCH": "sigusr1"})
    run.pause()
    first = run.process
    assert first is not None
    run.main_job()
    assert run.wait() == 8, run.said()
    assert f"process {first.pid} already supervises this run" in run.said()
    run.process = first
    first.send_signal(signal.SIGUSR1)

    def noticed() -> set[int]:
        said = [line for line in read_events(run.logs / "events.jsonl") if line["event"] == "notice"]
        return {line["told_rank"] for line in said if line["source"] == "sigusr1"}

    wait_until(lambda: noticed() == {0, 1}, SECONDS_MAX, lambda: f"{noticed()} heard it:\n{run.said()}")
    assert first.poll() is None
    assert all(psutil.pid_exists(run.pid(rank)) for rank in range(2))
    first.terminate()
    assert run.wait() == 130, run.said()
    assert [line["cause"] for line in run.status("over")] == ["stopped"]
    # The stager left last and by itself: a last checkpoint of the trainers would still have been taken.
    events = read_events(run.logs / "events.jsonl")
    assert [line["event"] for line in events if line["event"] in {"stager_ended", "rank_lost"}][
        -1
    ] == "stager_ended"
    run.assert_nothing_left()
    assert {item.step for item in Catalog(open_store(run.store)).list()} == {3, 7}
