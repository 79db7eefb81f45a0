"""A small training under `holdfast run` on this machine, and what happened in it.

Supervised ─► holdfast run ─► mpirun ─► ranks (supervised_rank.py)      kill(): SIGKILL to one of them
                  └─ status.jsonl           └─ attempt-<n>.jsonl ─► Attempt: when it trained, when each step ended
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.jobs import Folders, rank_environment

__all__ = ["Attempt", "Program", "Supervised", "lines"]

_WAIT_SECONDS_MAX = 120.0
_END_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.02
_RANK = "benchmarks.supervised_rank"
_KEEPER = "operator_side.supervise.rank"


@dataclass(frozen=True)
class Program:
    """What is trained.

    Attributes:
        model: As of `benchmarks.workload`.
        ranks: How many.
        every: Iterations between two checkpoints.
        compute_seconds, update_seconds: Of an iteration; both are timed waits, as if a device worked.
    """

    model: str
    ranks: int
    every: int
    compute_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class Attempt:
    """One launch, as far as it came.

    Attributes:
        first_step: The step that it begins with.
        begun: When it began to train.
        restore_seconds: Of its restore, the wait for the stager included.
        ends: When each step ended.
    """

    first_step: int
    begun: float
    restore_seconds: float
    ends: tuple[float, ...]

    def steps_by(self, moment: float) -> int:
        """Steps of the whole training that were done by then."""
        return self.first_step + sum(end <= moment for end in self.ends)


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; none if there is no such file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Supervised:
    """One `holdfast run`. A context manager: at its end no process of it is left.

    Args:
        program: What it runs.
        folders: Where it writes; the caller removes them.
        name: Of its own folder.
    """

    def __init__(self, program: Program, folders: Folders, name: str) -> None:
        self._folder = folders.scratch / name
        self.store = self._folder / "run"
        self._folder.mkdir()
        environment = rank_environment(program.ranks, folders, chunk_bytes=1 << 20, ring_bytes=64 << 20)
        for variable in (
            "MASTER_ADDR",
            "MASTER_PORT",
            "WORLD_SIZE",
        ):  # the ranks agree on them anew at each launch
            del environment[variable]
        command = [
            sys.executable,
            "-m",
            "holdfast",
            "run",
            "-n",
            str(program.ranks),
            "--store",
            str(self.store),
        ]
        command += ["--logs", str(self._folder / "logs"), "--", sys.executable, "-m", _RANK]
        command += ["--model", program.model, "--every", str(program.every), "--out", str(self._folder)]
        command += ["--compute-seconds", str(program.compute_seconds)]
        command += ["--update-seconds", str(program.update_seconds)]
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

    def attempts(self) -> list[Attempt]:
        """Those that have begun to train, in order."""
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
        """What the supervisor has noted of that kind."""
        return [line for line in lines(self._folder / "logs" / "status.jsonl") if line["event"] == event]

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Until it is so.

        Raises:
            RuntimeError: It was not within two minutes, or the run has ended.
        """
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not seen under holdfast run; it said:\n{self._last_words()}")
            time.sleep(_LOOK_SECONDS)

    def kill(self, which: int) -> float | None:
        """SIGKILL to a rank.

        Args:
            which: One of those that live, counted round.

        Returns:
            When; None if no rank was there to be killed.
        """
        pids = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                words = process.cmdline()
                if _RANK in words and _KEEPER not in words and Path(words[0]).name.startswith("python"):
                    pids.append(process.pid)
        if not pids:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(sorted(pids)[which % len(pids)], signal.SIGKILL)
        return time.monotonic()

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
                    process.kill()  # by its handle: never a number that was used again
            self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        return self._said.read_text(errors="replace")[-4000:]
