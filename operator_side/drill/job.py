"""One `holdfast run` of a drill: a process with a store, logs and a diary of its own.

    Run ── starts ─► holdfast run ─► mpirun ─► ranks, stager        strike, tell: signals to those processes alone
     └─ follows ◄── diary.jsonl (ranks) · events.jsonl (ranks, stager, flusher) · status.jsonl (supervisor)

All processes are on this machine. They are children of this `holdfast run`, or ranks named in its diary.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast.errors import PeerLost
from holdfast.supervised import DIARY_VARIABLE
from operator_side.drill.kill_plan import Kill, KillTarget
from operator_side.supervise.attempt import processes_of_session
from operator_side.supervise.job_output import Follower
from operator_side.supervise.supervisor import environment_of_job

_END_SECONDS = 60.0
_PARENT_FIELD = 1  # of /proc/PID/stat, counted from behind the command's name
# A drill must not touch the store, logs and tiers of the user's own run.
_LEFT_OUT = ("HOLDFAST_STORE", "HOLDFAST_EVENTS", "HOLDFAST_TIERS", "HOLDFAST_METRICS_PORT")


@dataclass(frozen=True)
class Setup:
    """The job of a drill.

    Attributes:
        command: Command of the user's script.
        ranks: Number of training ranks.
        options: Further options for `holdfast run`.
        notice_seconds: Time from a notice to the kill, as told to the ranks.
    """

    command: Sequence[str]
    ranks: int
    options: Sequence[str]
    notice_seconds: float


class DrillRun:
    """A running `holdfast run`. On leaving the context, none of its processes runs any more.

    Args:
        setup: The job.
        folder: New folder for store, logs and diary.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.folder, self._setup = folder, setup
        self.store, self.logs = folder / "store", folder / "logs"
        self.logs.mkdir(parents=True)
        self._output: IO[bytes] = (folder / "output.log").open("wb")
        self._follow = {name: Follower(self.logs / f"{name}.jsonl") for name in ("diary", "events", "status")}
        self.said: dict[str, list[dict[str, Any]]] = {name: [] for name in self._follow}
        own = {
            "HOLDFAST_STORE": str(self.store),
            "HOLDFAST_EVENTS": str(self.logs / "events.jsonl"),
            "HOLDFAST_WATCH": "sigterm",
            "HOLDFAST_WATCH_GRACE_SECONDS": str(setup.notice_seconds),
            DIARY_VARIABLE: str(self.logs / "diary.jsonl"),
        }
        kept = {name: value for name, value in environment_of_job().items() if name not in _LEFT_OUT}
        # The leash ties the job to this process, so that a killed drill leaves no job behind.
        leash = [sys.executable, "-m", "operator_side.supervise.leash", str(os.getpid())]
        line = [
            *leash,
            sys.executable,
            "-m",
            "holdfast",
            "run",
            "-n",
            str(setup.ranks),
            "--store",
            str(self.store),
        ]
        line += ["--logs", str(self.logs), "--set", "keep_last=0", *setup.options, "--", *setup.command]
        self._process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, env={**kept, **own}
        )

    def __enter__(self) -> DrillRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        if self._process.poll() is None:
            self._process.kill()  # its processes are tied to it
            self._process.wait()
        self._output.close()

    def look(self) -> tuple[bool, Mapping[str, list[dict[str, Any]]]]:
        """Whether the run has ended, and the new lines of `diary`, `events` and `status`."""
        ended = self._process.poll() is not None  # before reading, so that no last line is missed
        new: dict[str, list[dict[str, Any]]] = {}
        for name, follower in self._follow.items():
            new[name] = []
            while more := list(follower.read()):
                new[name] += more
            self.said[name] += new[name]
        return ended, new

    @property
    def exit_code(self) -> int | None:
        """Exit code of `holdfast run`; None while it runs."""
        return self._process.poll()

    def tell(self, kill: Kill) -> bool:
        """Send SIGTERM to the rank of the kill. Returns whether there was one."""
        return self._signal(self._rank(kill.rank), signal.SIGTERM)

    def strike(self, kill: Kill) -> bool:
        """Send SIGKILL. Returns whether there was a process to kill."""
        match kill.target:
            case KillTarget.RANK:
                return self._signal(self._rank(kill.rank), signal.SIGKILL)
            case KillTarget.RANKS | KillTarget.STAGER as target:
                stager = self._stager() if target is KillTarget.STAGER else []
                ranks = [pid for rank in range(self._setup.ranks) for pid in self._rank(rank)]
                return self._signal([*stager, *ranks], signal.SIGKILL)
            case KillTarget.MPIRUN:
                return self._signal(self._mpirun(), signal.SIGKILL)
            case KillTarget.WRAPPER:
                return self._signal(
                    [parent for pid in self._rank(kill.rank) if (parent := _parent(pid)) > 1], signal.SIGKILL
                )

    def last_words(self, lines: int = 25) -> str:
        """The last lines of its output."""
        text = (self.folder / "output.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _rank(self, rank: int) -> list[int]:
        begun = [line for line in self.said["diary"] if "begins" in line and line.get("rank") == rank]
        return [int(begun[-1]["pid"])] if begun else []

    def _mpirun(self) -> list[int]:
        found = []
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit():
                pid = int(directory.name)
                if _parent(pid) == self._process.pid:
                    found.append(pid)
        return found

    def _stager(self) -> list[int]:
        session = [pid for mpirun in self._mpirun() for pid in processes_of_session(mpirun)]
        found = []
        for pid in session:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"stager" in words and b"operator_side.supervise.rank" not in words:
                    found.append(pid)
        return [pid for pid in found if pid not in self._mpirun()]

    def _signal(self, pids: Sequence[int], number: signal.Signals) -> bool:
        sent = False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                sent = True
        return sent


def _parent(pid: int) -> int:
    """The process that started this one; 0 if there is none any more."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[_PARENT_FIELD])
    return 0


def wait_until(deadline: float) -> None:
    """Sleep for a moment. Raises `PeerLost` after the deadline."""
    if time.monotonic() > deadline:
        raise PeerLost("the drill took longer than --seconds-max; raise it, or give the script fewer steps")
    time.sleep(0.01)
