"""A small training on this machine under `holdfast run` or torchrun, or the same training without holdfast.

Supervised ─► holdfast run ─► mpirun ─► ranks (supervised_rank.py)      kill(): SIGKILL to one of them
                  └─ status.jsonl           └─ attempt-<n>.jsonl ─► Attempt: when it trained, when each step ended
Elastic    ─► torchrun ─► ranks, and a standing stager
BareMpirun ─► a shell that restarts mpirun when it fails ─► ranks --bare
BareTorchrun ─► torchrun ─► ranks --bare
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.jobs import OF_RENDEZVOUS, Folders, StandingStager, rank_environment, torchrun_line
from holdfast.mpirun import mpirun_command
from holdfast.supervised import ATTEMPT_VARIABLE
from holdfast.telemetry.event_files import numbered_files

__all__ = ["Attempt", "BareMpirun", "BareTorchrun", "Elastic", "Program", "Supervised", "lines"]

_WAIT_SECONDS_MAX = 120.0
_END_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.02
_RANK = "benchmarks.supervised_rank"
_KEEPER = "operator_side.supervise.rank"
_RING_BYTES = 64 << 20
_RESTARTS_MAX = 10
_AGAIN = (
    f'until "$@"; do {ATTEMPT_VARIABLE}=$(({ATTEMPT_VARIABLE} + 1)); done'  # in the environment: exported
)


@dataclass(frozen=True)
class Program:
    """A training and its times.

    Attributes:
        model: See `benchmarks.workload`.
        compute_seconds, update_seconds: Parts of an iteration; both are timed waits, as if a device worked.
        peer: The peer that saves and restores without holdfast; empty: nothing is saved then.
    """

    model: str
    ranks: int
    every: int
    compute_seconds: float
    update_seconds: float
    peer: str = ""


@dataclass(frozen=True)
class Attempt:
    """One launch so far.

    Attributes:
        restore_seconds: Time of the restore, the wait for the stager included.
    """

    first_step: int
    begun: float
    restore_seconds: float
    ends: tuple[float, ...]

    def steps_by(self, moment: float) -> int:
        """Return the number of steps, over the whole training, done by `moment`."""
        return self.first_step + sum(end <= moment for end in self.ends)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines and its rotated predecessors; none without a file."""
    files = [*(older for _, older in numbered_files(path)), path]
    text = [
        line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines(True)
    ]
    return [json.loads(line) for line in text if line.endswith("\n")]


class Supervised:
    """One `holdfast run`. A context manager: at its end no process is left.

    Args:
        folders: Folders for its files; the caller removes them.
    """

    def __init__(
        self, program: Program, folders: Folders, name: str, *, ring_bytes: int = _RING_BYTES
    ) -> None:
        self._folder = folders.scratch / name
        self.store = self._folder / "run"
        self._folder.mkdir()
        environment: Mapping[str, str] = rank_environment(
            program.ranks, folders, chunk_bytes=1 << 20, ring_bytes=ring_bytes
        )
        trained = [
            "-m",
            _RANK,
            "--model",
            program.model,
            "--every",
            str(program.every),
            "--out",
            str(self._folder),
        ]
        trained += ["--compute-seconds", str(program.compute_seconds)]
        trained += ["--update-seconds", str(program.update_seconds)]
        trained += ["--peer", program.peer] if program.peer else []
        command, environment = self._prepare(program.ranks, trained, environment)
        self._said = self._folder / "said"
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _prepare(
        self, ranks: int, trained: list[str], environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return the command that starts the job, and its environment."""
        command = [sys.executable, "-m", "holdfast", "run", "-n", str(ranks), "--store", str(self.store)]
        command += ["--logs", str(self._folder / "logs"), "--", sys.executable, *trained]
        return command, _unmet(environment)

    def attempts(self) -> list[Attempt]:
        """Return the attempts that have begun to train, in order."""
        paths = sorted(
            self._folder.glob("attempt-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2])
        )
        found = []
        for path in paths:
            written = lines(path)
            if written:
                head, *steps = written
                ends = tuple(step["at"] for step in steps)
                found.append(Attempt(head["step"], head["at"], head["restore_seconds"], ends))
        return found

    def status(self, event: str) -> list[dict[str, Any]]:
        """Return the supervisor's log lines with that event."""
        return [line for line in lines(self._folder / "logs" / "status.jsonl") if line["event"] == event]

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()`.

        Raises:
            RuntimeError: `ready()` stayed false for two minutes, or the run has ended.
        """
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not seen under holdfast run; it said:\n{self._last_words()}")
            time.sleep(_LOOK_SECONDS)

    def kill(self, which: int) -> float | None:
        """Send SIGKILL to a rank.

        Returns:
            The time of the kill; None if no rank was running.
        """
        pids = self._ranks()
        if not pids:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(sorted(pids)[which % len(pids)], signal.SIGKILL)
        return time.monotonic()

    def kill_all(self) -> float:
        """Send SIGKILL to all ranks; return the time.

        Raises:
            RuntimeError: No rank is running.
        """
        pids = self._ranks()
        if not pids:
            raise RuntimeError(f"no rank is there to be killed:\n{self._last_words()}")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def _ranks(self) -> list[int]:
        pids = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                words = process.cmdline()
                if (
                    _RANK in words
                    and _KEEPER not in words
                    and "torch.distributed.run" not in words
                    and Path(words[0]).name.startswith("python")
                ):
                    pids.append(process.pid)
        return pids

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS_MAX)
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()  # by handle: the pid may belong to another process by now
            self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        return self._said.read_text(errors="replace")[-4000:]


class Elastic(Supervised):
    """The same under torchrun, which restarts the ranks; they join a standing stager. Arguments as of `Supervised`."""

    def _prepare(
        self, ranks: int, trained: list[str], environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        self.store.mkdir()
        environment = _unmet(environment)
        stager = [sys.executable, "-m", "holdfast", "stager", "--store", str(self.store)]
        self._stager = StandingStager(stager, environment, self._folder)
        return torchrun_line(ranks, trained, restarts=_RESTARTS_MAX), {**environment, **self._stager.joining}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stager.end()


class BareMpirun(Supervised):
    """The same script without holdfast, under an mpirun that a shell restarts. Arguments as of `Supervised`."""

    def _prepare(
        self, ranks: int, trained: list[str], environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        line = mpirun_command(ranks, [sys.executable, *trained, "--bare"], ulfm=False)
        return ["sh", "-c", _AGAIN, "sh", *line], {**environment, ATTEMPT_VARIABLE: "1"}


class BareTorchrun(Supervised):
    """The same script without holdfast, under torchrun. Arguments as of `Supervised`."""

    def _prepare(
        self, ranks: int, trained: list[str], environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        return torchrun_line(ranks, [*trained, "--bare"], restarts=_RESTARTS_MAX), _unmet(environment)


def _unmet(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop the rendezvous variables: holdfast and torchrun choose the rendezvous at each launch."""
    return {name: value for name, value in environment.items() if name not in OF_RENDEZVOUS}
