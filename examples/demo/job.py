"""One job of the demo: start it, follow its progress file, kill its training ranks, find what it leaves behind.

Only processes of this job are ever signalled: ranks are found as descendants of our own launcher, and leftovers by the
runtime directory in their environment, which no other job on the machine has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from holdfast.mpirun import mpirun_command

__all__ = ["DemoError", "Job", "Step", "clean_environment"]

TRAIN_SCRIPT = Path(__file__).resolve().parents[1] / "train_gpt.py"
POLL_SECONDS = 0.02
QUIET_SECONDS_MAX = 120.0  # a job without progress for this long counts as hung
END_SECONDS_MAX = 90.0
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
_LISTENS = re.compile(r"listens at (\S+);")


class DemoError(Exception):
    """The demo could not run to its end, for reasons unrelated to the facts that it checks."""


@dataclass(frozen=True)
class Step:
    """One line of the progress file."""

    step: int
    loss: float
    seconds: float


def clean_environment(runtime: Path, **settings: str) -> dict[str, str]:
    """Return this process's environment without settings of another holdfast or MPI job, plus `settings`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOLDFAST_", "OMPI_", "PMIX_"))
    }
    ours = {f"HOLDFAST_{name}": value for name, value in settings.items()}
    # Open MPI's segments go beside the ring: a killed rank leaves its own, which are removed with the folder.
    segments = {"OMPI_MCA_btl_sm_backing_directory": str(runtime.parent)}
    return {**kept, **ours, **segments, "HOLDFAST_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"}


class Job:
    """One launcher with training ranks and, given a store, a stager. A context manager: at its end nothing runs.

    Under mpirun the stager is a process of the job. Under torchrun it is a standing stager that ends after this job.

    Args:
        name: Names the files of this job in `folder`.
        folder: Where progress, output and events go.
        ranks: Number of training ranks.
        arguments: Arguments for the training script.
        store: The store's URL; None runs without a stager.
        runtime: A directory for the ring that no other job uses.
        launcher: `mpirun` or `torchrun`.
        settings: `HOLDFAST_*` settings, without that prefix.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        ranks: int,
        arguments: list[str],
        store: Path | None,
        runtime: Path,
        launcher: str,
        settings: Mapping[str, str],
    ) -> None:
        self.name, self.runtime, self.launcher = name, runtime, launcher
        self.progress, self.log, self.events = (
            folder / f"{name}.{kind}" for kind in ("jsonl", "log", "events.jsonl")
        )
        self.progress.touch()
        self._environment = clean_environment(runtime, EVENTS=str(self.events), **settings)
        self._folder = folder
        training = [str(TRAIN_SCRIPT), "--progress", str(self.progress), *arguments]
        holdfast = str(Path(sys.executable).with_name("holdfast"))
        stager = None if store is None else [holdfast, "stager", "--store", str(store)]
        self._stager: psutil.Popen | None = None
        if launcher == "torchrun":
            if stager is not None:
                self._stager = self._start([*stager, "--listen", "127.0.0.1:0", "--once"])
                self._environment["HOLDFAST_STAGER"] = self._address()
            command = [sys.executable, *_TORCHRUN, "--nproc-per-node", str(ranks), *training]
        else:
            command = mpirun_command(ranks, [sys.executable, *training], stager=stager)
        self._launcher = self._start(command)

    def _start(self, command: list[str]) -> psutil.Popen:
        with self.log.open("ab") as output:
            return psutil.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _address(self) -> str:
        """Return the address at which the stager listens, from its output."""
        assert self._stager is not None
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        while self._stager.poll() is None and time.monotonic() < deadline:
            if found := _LISTENS.search(self.log.read_text(errors="replace")):
                return found[1]
            time.sleep(POLL_SECONDS)
        self._stager.kill()
        raise DemoError(f"{self.name}: the stager does not listen; it said:\n{self.output()}")

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.leftovers():  # includes the launcher, if it still runs
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._launcher.wait()
        if self._stager is not None:
            self._stager.wait()

    def follow(self, watch: Callable[[], None] = lambda: None) -> Iterator[Step]:
        """Yield steps as the training reports them, until the launcher has ended. Call `watch` at every poll.

        Raises:
            DemoError: The job still runs, but made no progress for too long.
        """
        heard = time.monotonic()
        with self.progress.open(encoding="utf-8") as lines:
            while True:
                ended = (
                    self._launcher.poll() is not None
                )  # checked before reading, so that no last line is missed
                watch()
                while (line := lines.readline()).endswith("\n"):
                    heard = time.monotonic()
                    yield Step(**json.loads(line))
                lines.seek(lines.tell() - len(line))  # an incomplete line; the next poll reads it whole
                if ended:
                    return
                if time.monotonic() - heard > QUIET_SECONDS_MAX:
                    raise DemoError(
                        f"{self.name}: no progress for {QUIET_SECONDS_MAX:.0f} s; it said:\n{self.output()}"
                    )
                time.sleep(POLL_SECONDS)

    def training_ranks(self) -> list[psutil.Process]:
        """Return the living training processes of this job, found below our own launcher."""
        found = []
        for process in self._launcher.children(recursive=True):
            try:
                if str(TRAIN_SCRIPT) in process.cmdline():  # a zombie has no command line
                    found.append(process)
            except psutil.Error:  # ended meanwhile
                continue
        return found

    def kill_training_ranks(self) -> list[int]:
        """Send SIGKILL to every training rank without notice, as at the loss of a spot VM. Return their process ids."""
        ranks = self.training_ranks()
        for process in ranks:
            os.kill(process.pid, signal.SIGKILL)
        return [process.pid for process in ranks]

    def succeed(self) -> None:
        """Wait for the launcher to end successfully.

        Raises:
            DemoError: The launcher failed.
        """
        code = self._wait_for_launcher()
        if code != 0:
            raise DemoError(
                f"{self.name}: {self.launcher} ended with exit code {code}; it said:\n{self.output()}"
            )

    def settle(self, watch: Callable[[], None] = lambda: None) -> list[psutil.Process]:
        """Wait until the launcher and all its descendants have ended. Return the processes left after the limit."""
        deadline = time.monotonic() + END_SECONDS_MAX
        while (left := self._everything()) and time.monotonic() < deadline:
            watch()
            time.sleep(POLL_SECONDS * 5)
        watch()
        return left

    def leftovers(self) -> list[psutil.Process]:
        """Return the living processes of this job, also those outside its process tree, such as the flusher."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("HOLDFAST_RUNTIME_DIR") == str(self.runtime)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # ended meanwhile, or owned by another user
                continue
        return found

    def output(self) -> str:
        """Return the last lines of the job's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def _wait_for_launcher(self) -> int:
        try:
            return int(self._launcher.wait(END_SECONDS_MAX))
        except psutil.TimeoutExpired:
            raise DemoError(
                f"{self.name}: {self.launcher} did not end in {END_SECONDS_MAX:.0f} s; it said:\n{self.output()}"
            ) from None

    def _everything(self) -> list[psutil.Process]:
        for process in (self._launcher, self._stager):
            if process is not None:
                process.poll()  # reaps the launcher once it has ended
        return self.leftovers()
