"""`holdfast run --launcher torchrun` on real jobs: stager and rank killed, ended by Ctrl-C, stopped by a bug."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.ring.directory import runtime_directory
from holdfast.store import open_store
from tests.integration.jobs import in_a_pod
from tests.integration.jobs.in_a_pod import EVERY, MET_AT, STEPS, counted_after
from tests.integration.test_run import SETTINGS
from tests.support.cluster import wait_until
from tests.support.events import read_events
from tests.support.job import environment

RANKS = 2
SECONDS_MAX = 240.0


class TorchrunOfRun:
    """One `holdfast run --launcher torchrun`; all its processes end with the test."""

    def __init__(self, directory: Path) -> None:
        self.store, self.runtime, self.out = (
            str(directory / "store"),
            directory / "runtime",
            directory / "out",
        )
        self.out.mkdir()
        self.logs, self._said = directory / "logs", directory / "said"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, *command: str, options: tuple[str, ...] = (), ranks: int = RANKS
    ) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "holdfast", "run", "--launcher", "torchrun", "-n", str(ranks)]
        line += ["--store", self.store, "--logs", str(self.logs), *SETTINGS, *options, "--", *command]
        with self._said.open("wb") as said:
            env = environment(self.runtime, OUT=str(self.out))
            self.process = subprocess.Popen(line, env=env, stdout=said, stderr=said, start_new_session=True)
        return self.process

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def until_ready(self) -> None:
        """Wait until all ranks pause in mid-run."""

        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.said()
            return all((self.out / f"ready-{rank}").exists() for rank in range(RANKS))

        wait_until(ready, SECONDS_MAX, "the ranks do not come so far")

    def wait(self) -> int:
        assert self.process is not None
        try:
            return self.process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end; it said:\n{self.said()}")

    def stager(self) -> int | None:
        """Return the stager's process id."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
                if "stager" in child.cmdline():
                    return child.pid
        return None

    def newest_step(self) -> int | None:
        return Catalog(open_store(self.store)).highest_good_step()

    def living(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("HOLDFAST_RUNTIME_DIR") == str(self.runtime)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def roles(self) -> set[str]:
        """Return the processes that still run: `stager`, `flusher`, or another one's command line."""
        found = set()
        for pid in self.living():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = psutil.Process(pid).cmdline()
                found.add(next((role for role in ("stager", "flusher") if role in words), " ".join(words)))
        return found

    def check_nothing_left(self) -> None:
        wait_until(lambda: not self.living(), SECONDS_MAX, lambda: f"processes of it live on:\n{self.said()}")
        assert not runtime_directory(self.store, self.runtime).exists()

    def close(self) -> None:
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TorchrunOfRun]:
    run = TorchrunOfRun(tmp_path)
    yield run
    run.close()


def test_a_killed_stager_is_started_again_and_torchrun_restarts_killed_ranks_which_resume(
    run: TorchrunOfRun,
) -> None:
    told = run.out / "told"
    run.start(in_a_pod.__file__, options=("--notify-command", f'echo "$HOLDFAST_EVENT" >> {told}'))
    run.until_ready()
    killed = run.stager()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: run.stager() not in {killed, None}, SECONDS_MAX, "no other stager")
    # Only a stager that a rank has joined can tell people that the rank was killed.
    joined = "the stager is reached again after"
    wait_until(lambda: run.said().count(joined) == RANKS, SECONDS_MAX, run.said)
    (run.out / "go-on").touch()
    os.kill(int((run.out / "pid-1").read_text()), signal.SIGKILL)
    assert run.wait() == 0, run.said()
    for rank in range(RANKS):
        before, after = map(int, (run.out / f"start-{rank}").read_text().split())
        assert (before, after >= STEPS - EVERY) == (0, True)
        assert (run.out / f"final-{rank}").read_text() == str(counted_after(after))
        assert run.newest_step() == max(STEPS, after + EVERY) - 1
    (address,) = re.findall(r"the stager listens at (\S+);", run.said())
    assert f"the stager was killed by SIGKILL; it is started again now at {address}" in run.said()
    assert f"HOLDFAST_STAGER={os.uname().nodename}:29411 HOLDFAST_KEY_FILE=key holdfast rank -- torchrun" in (
        run.said()
    )
    assert {"stager_lost", "stager_back", "killed", "resume_proof", "over"} <= set(told.read_text().split())
    run.check_nothing_left()


def test_ctrl_c_is_a_notice_after_which_the_last_step_is_durable(run: TorchrunOfRun) -> None:
    process = run.start(in_a_pod.__file__)
    run.until_ready()
    process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.said()
    newest = run.newest_step()
    assert newest is not None
    assert newest > MET_AT
    run.check_nothing_left()


def test_a_killed_command_leaves_a_stager_that_drains_and_the_same_command_resumes(
    run: TorchrunOfRun,
) -> None:
    process = run.start(in_a_pod.__file__)
    run.until_ready()
    assert {"stager", "flusher"} < run.roles()
    process.kill()
    process.wait(30)
    wait_until(lambda: run.roles() <= {"stager", "flusher"}, SECONDS_MAX, lambda: f"{run.roles()} live on")
    run.check_nothing_left()
    staged = [event["step"] for event in read_events(run.logs / "events.jsonl") if event["event"] == "staged"]
    newest = run.newest_step()
    assert newest is not None
    assert newest == max(staged) >= EVERY - 1
    with (run.logs / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if anything of it still has the lock
    (run.out / "go-on").touch()
    run.start(in_a_pod.__file__)
    assert run.wait() == 0, run.said()
    for rank in range(RANKS):
        assert (run.out / f"start-{rank}").read_text().split() == ["0", str(newest + 1)]
        assert (run.out / f"final-{rank}").read_text() == str(counted_after(newest + 1))
    run.check_nothing_left()


def test_a_script_that_always_fails_has_its_own_code_after_the_restarts(run: TorchrunOfRun) -> None:
    script = run.out / "failing.py"
    script.write_text('print("begins", flush=True)\nraise SystemExit(7)\n')
    run.start(str(script), options=("--restarts-max", "1"), ranks=1)
    assert run.wait() == 7, run.said()
    assert run.said().count("begins\n") == 2
    run.check_nothing_left()
