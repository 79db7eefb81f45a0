"""One run of a drill: a job with a store, logs and a diary of its own, on this machine.

    DrillRun ── SupervisedRun    holdfast run ─► mpirun ─► ranks, stager           supervised_run.py
                   └─ TorchrunRun    the same ─► torchrun ─► ranks · stager        torchrun_run.py
       └─ follows ◄── diary.jsonl (ranks) · events.jsonl (ranks, stager, flusher) · what is told of starts and losses

Signals go to the processes of this run alone: its children, and ranks named in its diary.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast.errors import PeerLost
from holdfast.supervised import DIARY_VARIABLE
from holdfast.telemetry.event_follower import Follower
from operator_side.drill.kill_plan import Kill
from operator_side.supervise.supervisor import environment_of_job
from operator_side.supervise.tied import tied

_END_SECONDS = 60.0
_TORCHRUN_FAILS = re.compile(r"^[EW]\d{4} [\d:.]+ \d+ \S*torch/distributed/elastic", re.MULTILINE)
_PARENT_FIELD = 1  # of /proc/PID/stat, counted from behind the command's name
# A drill must not touch the store, logs and tiers of the user's own run, and tells nobody of its kills.
_LEFT_OUT = (
    "HOLDFAST_STORE",
    "HOLDFAST_EVENTS",
    "HOLDFAST_TIERS",
    "HOLDFAST_METRICS_PORT",
    "HOLDFAST_STAGER",
    "HOLDFAST_KEY",
    "HOLDFAST_KEY_FILE",
    "HOLDFAST_NOTIFY",
)


@dataclass(frozen=True)
class Setup:
    """The job of a drill.

    Attributes:
        notice_seconds: Time from a notice to the kill, as told to the ranks.
    """

    command: Sequence[str]
    ranks: int
    settings: Sequence[str]
    options: Sequence[str] = ()
    notice_seconds: float = 30.0
    gives_notice: bool = False
    launcher: str = "mpirun"


class DrillRun(abc.ABC):
    """A running job. On leaving the context, none of its processes runs any more."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.folder, self._setup = folder, setup
        self.store, self.logs = folder / "store", folder / "logs"
        self.logs.mkdir(parents=True)
        self._output: IO[bytes] = (folder / "output.log").open("wb")
        self._follow = {name: Follower(self.logs / f"{name}.jsonl") for name in ("diary", "events", "status")}
        self.said: dict[str, list[dict[str, Any]]] = {name: [] for name in self._follow}
        own = {
            "HOLDFAST_EVENTS": str(self.logs / "events.jsonl"),
            DIARY_VARIABLE: str(self.logs / "diary.jsonl"),
        }
        if setup.gives_notice:
            own["HOLDFAST_WATCH"] = "sigterm"
            own["HOLDFAST_WATCH_GRACE_SECONDS"] = str(setup.notice_seconds)
        kept = {name: value for name, value in environment_of_job().items() if name not in _LEFT_OUT}
        self._env = {**kept, **own}

    def __enter__(self) -> DrillRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._output.close()
        for follower in self._follow.values():
            follower.close()

    def look(self) -> tuple[bool, Mapping[str, list[dict[str, Any]]]]:
        """Whether the run has ended, and the new lines of `diary`, `events` and `status`."""
        ended = self.exit_code is not None  # before reading, so that no last line is missed
        new: dict[str, list[dict[str, Any]]] = {}
        for name, follower in self._follow.items():
            new[name] = []
            while more := list(follower.read()):
                new[name] += more
        new["status"] += self._heard(new)
        for name, lines in new.items():
            self.said[name] += lines
        return ended, new

    def _heard(self, new: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The lines of status that follow from these lines, where nobody writes them; may complete the lines."""
        del new
        return []

    @property
    @abc.abstractmethod
    def exit_code(self) -> int | None:
        """Exit code of the job; None while it runs."""

    @abc.abstractmethod
    def strike(self, kill: Kill) -> bool:
        """Send SIGKILL. Returns whether there was a process to kill."""

    @abc.abstractmethod
    def _end(self) -> None:
        """End whatever still runs."""

    def tell(self, kill: Kill) -> bool:
        """Send SIGTERM to the rank of the kill. Returns whether there was one."""
        return self._signal(self._rank(kill.rank), signal.SIGTERM)

    def last_words(self, lines: int = 25) -> str:
        """The last lines of its output."""
        text = (self.folder / "output.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def words_before_the_end(self, lines: int = 25) -> str:
        """The last lines before torchrun says that a rank has failed; without torchrun, the last of all."""
        text = (self.folder / "output.log").read_text(errors="replace")
        if (found := _TORCHRUN_FAILS.search(text)) is not None:
            text = text[: found.start()]
        return "\n".join(text.splitlines()[-lines:])

    def _start(self, line: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Tied to this process, so that a killed drill leaves nothing behind.
        return subprocess.Popen(
            tied(line), stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, env=env
        )

    def _rank(self, rank: int) -> list[int]:
        begun = [line for line in self.said["diary"] if "begins" in line and line.get("rank") == rank]
        return [int(begun[-1]["pid"])] if begun else []

    def _ranks(self) -> list[int]:
        return [pid for rank in range(self._setup.ranks) for pid in self._rank(rank)]

    @staticmethod
    def _signal(pids: Sequence[int], number: signal.Signals) -> bool:
        sent = False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                sent = True
        return sent


def end(process: subprocess.Popen[bytes]) -> None:
    """Have it end, by force if it takes too long; its own processes are tied to it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()


def parent_of(pid: int) -> int:
    """The process that started this one; 0 if it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[_PARENT_FIELD])
    return 0


def wait_until(deadline: float) -> None:
    """Sleep for a moment. Raises `PeerLost` after the deadline."""
    if time.monotonic() > deadline:
        raise PeerLost("the drill took longer than --seconds-max; raise it, or give the script fewer steps")
    time.sleep(0.01)
