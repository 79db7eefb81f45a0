"""`holdfast stager --notify` on real jobs: beside torchrun, in an mpirun job, and under `holdfast run`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.jobs import in_a_pod
from tests.support.cluster import SMALL, wait_until
from tests.support.events import read_events
from tests.support.job import Job, environment
from tests.support.post_server import SECRET, PostServer
from tests.support.standing_stager import standing_stager
from tests.support.torchrun import by_torchrun

RANKS = 2
SECONDS_MAX = 240.0


def written(command_file: Path) -> str:
    return f'echo "$HOLDFAST_EVENT $HOLDFAST_TEXT" >> {command_file}'


def kinds(command_file: Path) -> Counter[str]:
    lines = command_file.read_text().splitlines() if command_file.exists() else []
    return Counter(line.split()[0] for line in lines)


def until_ready(out: Path, job: Job) -> None:
    def ready() -> bool:
        assert job.process.poll() is None, job.output()
        return all((out / f"ready-{rank}").exists() for rank in range(RANKS))

    wait_until(ready, SECONDS_MAX, "the ranks do not come so far")


def test_a_standing_stager_tells_people_and_waits_for_no_destination(tmp_path: Path) -> None:
    """One destination never answers; the job, the other destination and the end of the stager do without it."""
    out, told, state = tmp_path / "out", tmp_path / "told", tmp_path / "state"
    for folder in (out, tmp_path / "store"):
        folder.mkdir()
    with contextlib.closing(PostServer()) as hanging:
        hanging.go_on.clear()
        env = environment(tmp_path / "stager-runtime", XDG_STATE_HOME=str(state), HOLDFAST_NOTIFY=hanging.url)
        more = ("--notify-command", written(told))
        with standing_stager(str(tmp_path / "store"), env, tmp_path / "log", *more) as stager:
            job_env = environment(tmp_path / "runtime", OUT=str(out), HOLDFAST_STAGER=stager.address)
            rewrite = by_torchrun(RANKS, restarts=1)
            with Job(
                RANKS, [in_a_pod.__file__], None, env=job_env, log=tmp_path / "job.log", rewrite=rewrite
            ) as job:
                until_ready(out, job)
                (out / "go-on").touch()
                os.kill(int((out / "pid-1").read_text()), signal.SIGKILL)
                job.succeed(SECONDS_MAX)
            wait_until(lambda: kinds(told)["job_ended"] > 0, SECONDS_MAX, stager.output)
            assert stager.stop() == 0, stager.output()
        assert hanging.said()[0]["event"] == "lost"
        assert SECRET not in stager.output()
    expected = {"lost", "job_ended", "resume_proof", "over"}
    # torchrun sends SIGTERM to the ranks that are left, which is a notice to those that hear it in time.
    assert expected <= kinds(told).keys() <= expected | {"notice"}, told.read_text()
    assert set(kinds(told).values()) == {1}, told.read_text()
    assert "stager stopped: the stager was told to stop" in told.read_text()
    (log,) = state.glob("holdfast/runs/*/events.jsonl")
    assert {"stager_ready", "staged", "flusher_ready", "durable"} <= {
        one["event"] for one in read_events(log)
    }


@pytest.mark.mpi
def test_the_stager_of_an_mpirun_job_tells_people(tmp_path: Path) -> None:
    """Unless `holdfast run` does: test_run."""
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(
        "import torch\n"
        "from holdfast import Checkpointer\n"
        "weights = torch.zeros(10)\n"
        "with Checkpointer({'weights': weights}, every=1) as checkpointer:\n"
        "    checkpointer.restore()\n"
        "    checkpointer.step(0)\n"
    )
    stager = ["--store", str(tmp_path / "store"), *SMALL, "--notify-command", written(told)]
    env = environment(tmp_path / "runtime", HOLDFAST_EVENTS=str(tmp_path / "events"))
    with Job(1, [str(script)], stager, env=env, log=tmp_path / "job.log") as job:
        job.succeed(SECONDS_MAX)
    assert kinds(told) == {"job_ended": 1}, job.output()


@pytest.mark.mpi
def test_a_stager_that_cannot_start_says_so_to_people(tmp_path: Path) -> None:
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(
        "import torch\nfrom holdfast import Checkpointer\nCheckpointer({'weights': torch.zeros(1)}, every=1)\n"
    )
    missing = tmp_path / "no" / "such" / "store"
    stager = ["--store", str(missing), *SMALL, "--notify-command", written(told)]
    env = environment(tmp_path / "runtime", HOLDFAST_EVENTS=str(tmp_path / "events"))
    with Job(1, [str(script)], stager, env=env, log=tmp_path / "job.log") as job:
        assert job.wait(SECONDS_MAX) != 0
    assert kinds(told) == {"over": 1}, job.output()
    assert "stager gave up" in told.read_text()
