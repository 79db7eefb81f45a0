"""Starts a real MPI job that always ends: own process group, a hard limit, its output in the failure message."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from holdfast.mpirun import mpirun_command

__all__ = ["HOLDFAST", "NOT_LAUNCHED", "QUICK_SITE", "REPOSITORY", "Job", "environment"]

_LAUNCHES_MAX = 3
_LAUNCH_SECONDS_MAX = 60.0
NOT_LAUNCHED = "PMIx server's listener thread failed to start"
REPOSITORY = Path(__file__).resolve().parents[2]
QUICK_SITE = REPOSITORY / "tests" / "support" / "quick_site"
HOLDFAST = str(Path(sys.executable).with_name("holdfast"))


def environment(runtime: Path, **more: str) -> dict[str, str]:
    """The environment of a job that shares nothing with other jobs on this machine."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMIX_", "HOLDFAST_"))
    }
    runtime.mkdir(parents=True, exist_ok=True)
    return {
        **kept,
        "HOLDFAST_RUNTIME_DIR": str(runtime),
        "XDG_STATE_HOME": str(runtime.with_name(f"{runtime.name}-logs")),
        # Open MPI leaves its shared-memory files behind when a rank is killed.
        "OMPI_MCA_btl_sm_backing_directory": str(runtime),
        "PYTHONPATH": f"{QUICK_SITE}{os.pathsep}{REPOSITORY}",
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_GRACE_SECONDS": "1",  # an idle flusher waits this long for a new job, and so do the tests
        **more,
    }


class Job:
    """One mpirun with `ranks` trainers and mostly a stager. A context manager: no process outlives the block.

    Args:
        trainer: Arguments after the Python interpreter.
        stager: Arguments after `holdfast stager`; None: no stager.
        rewrite: Changes the mpirun line before it is run.
    """

    def __init__(
        self,
        ranks: int,
        trainer: Sequence[str],
        stager: Sequence[str] | None,
        *,
        env: Mapping[str, str],
        log: Path,
        ulfm: bool = True,
        rewrite: Callable[[list[str]], list[str]] = list,
    ) -> None:
        command = rewrite(
            mpirun_command(
                ranks,
                [sys.executable, *trainer],
                stager=None if stager is None else [HOLDFAST, "stager", *stager],
                ulfm=ulfm,
            )
        )
        self.log = log
        for _ in range(_LAUNCHES_MAX):
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    command, env=dict(env), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            if not self._could_not_launch():
                break

    def _could_not_launch(self) -> bool:
        """Whether mpirun failed before it started any process, as happens now and then."""
        mpirun, deadline = psutil.Process(self.process.pid), time.monotonic() + _LAUNCH_SECONDS_MAX
        with contextlib.suppress(psutil.NoSuchProcess):
            while self.process.poll() is None and time.monotonic() < deadline:
                if mpirun.children():
                    return False
                time.sleep(0.02)
        return NOT_LAUNCHED in self.output()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self, seconds_max: float) -> int:
        """Wait for the end; at the limit kill everything and fail the test with the job's output."""
        try:
            return self.process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the job did not end within {seconds_max} s; it said:\n{self.output()}"
            ) from None

    def succeed(self, seconds_max: float) -> None:
        """Wait for the end and require exit code 0."""
        code = self.wait(seconds_max)
        assert code == 0, f"the job ended with exit code {code}; it said:\n{self.output()}"

    def output(self) -> str:
        """The job's output so far."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL mpirun and its children (the flusher runs in a session of its own and survives)."""
        if self.process.poll() is None:
            workers = _workers_of_torchrun(self.process.pid)
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()


def _workers_of_torchrun(pid: int) -> list[psutil.Process]:
    """The workers, each in a session of its own; none where mpirun has started the ranks."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if "TORCHELASTIC_RUN_ID" in process.environ():
                    found.append(process)
    return found
