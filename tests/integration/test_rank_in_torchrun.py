"""`holdfast rank` around each rank inside torchrun, with a standing stager: killed, restarted, exit codes judged."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.integration.jobs import in_a_pod
from tests.integration.jobs.in_a_pod import EVERY, STEPS, counted_after
from tests.support.cluster import wait_until
from tests.support.job import HOLDFAST, environment
from tests.support.standing_stager import StandingProcess, standing_stager

RANKS = 2
SECONDS_MAX = 240.0


class WrappedJob:
    """torchrun without a --rdzv-id, and a wrapper around each of its two ranks.

    Args:
        directory: Folder for logs and the ranks' files.
        stager: The ranks' stager.
    """

    def __init__(self, directory: Path, stager: StandingProcess) -> None:
        self.stager, self.out, self._log = stager, directory / "out", directory / "job.log"
        self.out.mkdir()
        self._env = environment(directory / "runtime", HOLDFAST_STAGER=stager.address, OUT=str(self.out))

    @contextlib.contextmanager
    def start(self, *around: str, restarts: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(RANKS),
            "--no-python",
        ]
        meeting = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
            "--max-restarts",
            str(restarts),
        ]
        each = [HOLDFAST, "rank", "--", sys.executable, in_a_pod.__file__]
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                [*around, *torchrun, *meeting, *each], env=self._env, stdout=output, stderr=output
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                for one in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                process.kill()
            process.wait()

    def until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until all ranks pause in mid-run; those of the next start will not pause."""

        def ready() -> bool:
            assert process.poll() is None, self.output()
            return all((self.out / f"ready-{rank}").exists() for rank in range(RANKS))

        wait_until(ready, SECONDS_MAX, lambda: f"the ranks do not come so far:\n{self.output()}")
        (self.out / "go-on").touch()

    def pid(self, rank: int) -> int:
        return int((self.out / f"pid-{rank}").read_text())

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def launches(self) -> list[str]:
        """Return the name of each launch that has joined the stager."""
        return re.findall(r"a job of 2 ranks joins \((.+)\)", self.stager.output())

    def check_resumed(self) -> None:
        for rank in range(RANKS):
            before, after = map(int, (self.out / f"start-{rank}").read_text().split())
            assert (before, after >= STEPS - EVERY) == (0, True)
            assert (self.out / f"final-{rank}").read_text() == str(counted_after(after))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[WrappedJob]:
    env = environment(tmp_path / "stager-runtime")
    with standing_stager(str(tmp_path / "store"), env, tmp_path / "stager.log", verbose=True) as stager:
        yield WrappedJob(tmp_path, stager)


def test_torchrun_restarts_the_wrapped_ranks_and_the_stager_knows_them_for_the_same_job(
    job: WrappedJob,
) -> None:
    with job.start(restarts=1) as process:
        job.until_ready(process)
        os.kill(job.pid(1), signal.SIGKILL)
        assert process.wait(SECONDS_MAX) == 0, job.output()
    job.check_resumed()
    first, second = job.launches()
    assert first == second
    assert "rank 1 on" in job.output()
    assert f"was killed by SIGKILL from outside; exit code {RETRY_EXIT_CODE}" in job.output()


def test_the_wrapper_around_torchrun_passes_on_what_the_one_around_the_rank_has_said(job: WrappedJob) -> None:
    with job.start(HOLDFAST, "rank", "--") as process:
        job.until_ready(process)
        os.kill(job.pid(1), signal.SIGKILL)
        assert process.wait(SECONDS_MAX) == RETRY_EXIT_CODE, job.output()


def check_a_bug(job: WrappedJob) -> None:
    """The exit code is that of the bug, or of the survivor if that ended first."""
    (job.out / "bug").touch()
    with job.start(HOLDFAST, "rank", "--") as process:
        assert process.wait(SECONDS_MAX) in {1, RETRY_EXIT_CODE}, job.output()
    assert "(ValueError); exit code 1" in job.output()


def test_an_agent_that_is_killed_takes_the_wrappers_and_their_ranks_with_it(job: WrappedJob) -> None:
    with job.start() as process:
        job.until_ready(process)
        pids = [job.pid(rank) for rank in range(RANKS)]
        pids += [psutil.Process(pid).ppid() for pid in pids]
        assert process.pid not in pids
        os.kill(process.pid, signal.SIGKILL)
        wait_until(
            lambda: not any(map(psutil.pid_exists, pids)),
            60,
            lambda: f"processes {pids} live on:\n{job.output()}",
        )
