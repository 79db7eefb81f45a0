"""One MPI job of the demo: start it, follow its progress file, kill its training ranks, see what it leaves behind.

Only processes that this job started are ever touched: ranks are found as descendants of our own mpirun, and what
is left over by the runtime directory in its environment, which no other job on the machine has.
"""

from __future__ import annotations

import contextlib
import json
import os
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
QUIET_SECONDS_MAX = 120.0  # a job that tells nothing for so long is taken to hang
END_SECONDS_MAX = 90.0


class DemoError(Exception):
    """The demo could not be played to its end; this says nothing about the facts that it checks."""


@dataclass(frozen=True)
class Step:
    """One line of the progress file."""

    step: int
    loss: float
    seconds: float


def clean_environment(runtime: Path, **settings: str) -> dict[str, str]:
    """This process's environment without settings of another holdfast or MPI job, and with ours."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOLDFAST_", "OMPI_", "PMIX_"))
    }
    ours = {f"HOLDFAST_{name}": value for name, value in settings.items()}
    # Open MPI's own segments go beside the ring: those of a killed rank stay behind, and are removed with the folder.
    segments = {"OMPI_MCA_btl_sm_backing_directory": str(runtime.parent)}
    return {**kept, **ours, **segments, "HOLDFAST_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"}


class Job:
    """One mpirun with training ranks and, given a store, a stager. A context manager: at its end nothing runs.

    Args:
        name: Names the files of this job in `folder`.
        folder: Where progress, output and events go.
        ranks: Training ranks.
        arguments: For the training script.
        store: The store's URL; None runs without a stager.
        runtime: A directory for the ring that no other job uses.
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
        settings: Mapping[str, str],
    ) -> None:
        self.name, self.runtime = name, runtime
        self.progress, self.log, self.events = (
            folder / f"{name}.{kind}" for kind in ("jsonl", "log", "events.jsonl")
        )
        self.progress.touch()
        trainer = [sys.executable, str(TRAIN_SCRIPT), "--progress", str(self.progress), *arguments]
        holdfast = str(Path(sys.executable).with_name("holdfast"))
        command = mpirun_command(
            ranks, trainer, stager=None if store is None else [holdfast, "stager", "--store", str(store)]
        )
        environment = clean_environment(runtime, EVENTS=str(self.events), **settings)
        with self.log.open("wb") as output:
            self._mpirun = psutil.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.leftovers():  # mpirun itself among them, if it still runs
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._mpirun.wait()

    def follow(self, watch: Callable[[], None] = lambda: None) -> Iterator[Step]:
        """Steps as the training tells them, until mpirun has ended. Calls `watch` on every look.

        Raises:
            DemoError: Nothing was told for too long; the job is still running.
        """
        heard = time.monotonic()
        with self.progress.open(encoding="utf-8") as lines:
            while True:
                ended = (
                    self._mpirun.poll() is not None
                )  # asked before reading, so that no last line is missed
                watch()
                while (line := lines.readline()).endswith("\n"):
                    heard = time.monotonic()
                    yield Step(**json.loads(line))
                lines.seek(
                    lines.tell() - len(line)
                )  # a line still being written; the next look reads it whole
                if ended:
                    return
                if time.monotonic() - heard > QUIET_SECONDS_MAX:
                    raise DemoError(
                        f"{self.name}: no progress for {QUIET_SECONDS_MAX:.0f} s; it said:\n{self.output()}"
                    )
                time.sleep(POLL_SECONDS)

    def training_ranks(self) -> list[psutil.Process]:
        """The training processes of this job that are alive, found below our own mpirun."""
        found = []
        for process in self._mpirun.children(recursive=True):
            try:
                if str(TRAIN_SCRIPT) in process.cmdline():  # a zombie has no command line any more
                    found.append(process)
            except psutil.Error:  # ended meanwhile
                continue
        return found

    def kill_training_ranks(self) -> list[int]:
        """SIGKILL every training rank, without notice, as when a spot VM is taken. Returns their process ids."""
        ranks = self.training_ranks()
        for process in ranks:
            os.kill(process.pid, signal.SIGKILL)
        return [process.pid for process in ranks]

    def succeed(self) -> None:
        """Wait for mpirun's end and demand that it went well.

        Raises:
            DemoError: It did not.
        """
        code = self._wait_for_mpirun()
        if code != 0:
            raise DemoError(f"{self.name}: mpirun ended with exit code {code}; it said:\n{self.output()}")

    def settle(self, watch: Callable[[], None] = lambda: None) -> list[psutil.Process]:
        """Wait until mpirun and all that it started has ended. Returns what is still there after the limit."""
        deadline = time.monotonic() + END_SECONDS_MAX
        while (left := self._everything()) and time.monotonic() < deadline:
            watch()
            time.sleep(POLL_SECONDS * 5)
        watch()
        return left

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this job that are alive, also those outside mpirun's family, such as the flusher."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("HOLDFAST_RUNTIME_DIR") == str(self.runtime)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # ended meanwhile, or not ours to look at
                continue
        return found

    def output(self) -> str:
        """The last lines of what the job has said."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def _wait_for_mpirun(self) -> int:
        try:
            return int(self._mpirun.wait(END_SECONDS_MAX))
        except psutil.TimeoutExpired:
            raise DemoError(
                f"{self.name}: mpirun did not end in {END_SECONDS_MAX:.0f} s; it said:\n{self.output()}"
            ) from None

    def _everything(self) -> list[psutil.Process]:
        self._mpirun.poll()  # reaps it once it has ended
        return self.leftovers()
