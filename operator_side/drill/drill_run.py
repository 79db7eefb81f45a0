"""One run of a drill: a job with its own store, logs and diary, on this machine.

    DrillRun         holdfast run ─► mpirun ─► ranks, stager
       │  └─ TorchrunRun         the same ─► torchrun ─► ranks · stager        torchrun_run.py
       └─ follows ◄── diary.jsonl (ranks) · events.jsonl (ranks, stager, flusher) · status.jsonl (starts and losses)

Signals only go to processes of this run: its children, and ranks named in its diary.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast.errors import PeerLost
from holdfast.process import parent_of, running_processes
from holdfast.supervised import DIARY_VARIABLE
from holdfast.telemetry.event_follower import Follower
from operator_side.drill.kill_plan import Kill, KillTarget
from operator_side.supervise.job_processes import processes_of_session
from operator_side.supervise.supervisor import job_environment
from operator_side.supervise.tied import tied_command

_END_SECONDS = 60.0
_OUTPUT_LINES = 25
_TORCHRUN_FAILS = re.compile(r"^[EW]\d{4} [\d:.]+ \d+ \S*torch/distributed/elastic", re.MULTILINE)
# A drill must not touch the store, logs and tiers of the user's own run, and sends no notifications.
_LEFT_OUT = {
    f"HOLDFAST_{name}"
    for name in ("STORE", "EVENTS", "TIERS", "METRICS_PORT", "STAGER", "KEY", "KEY_FILE", "NOTIFY")
}


@dataclass(frozen=True)
class DrillSetup:
    command: Sequence[str]
    ranks: int
    settings: Sequence[str]
    options: Sequence[str] = ()
    notice_seconds: float = 30.0  # from a notice to the kill, as the ranks are told
    gives_notice: bool = False
    launcher: str = "mpirun"


class DrillRun:
    """A running `holdfast run`, which restarts the job and writes `status.jsonl`; no process outlives the context.
    `kills`: number of planned kills; 0: the first failure ends the run.
    """

    def __init__(self, setup: DrillSetup, folder: Path, *, kills: int) -> None:
        self.folder, self._setup, self._kills = folder, setup, kills
        self.store, self.logs = folder / "store", folder / "logs"
        self.logs.mkdir(parents=True)
        self._output: IO[bytes] = (folder / "output.log").open("wb")
        self._followers = {
            name: Follower(self.logs / f"{name}.jsonl") for name in ("diary", "events", "status")
        }
        self.lines: dict[str, list[dict[str, Any]]] = {name: [] for name in self._followers}
        self._env = {name: value for name, value in job_environment().items() if name not in _LEFT_OUT}
        self._env["HOLDFAST_EVENTS"] = str(self.logs / "events.jsonl")
        self._env[DIARY_VARIABLE] = str(self.logs / "diary.jsonl")
        if setup.gives_notice:
            self._env["HOLDFAST_WATCH"] = "sigterm"
            self._env["HOLDFAST_WATCH_GRACE_SECONDS"] = str(setup.notice_seconds)
        self._process = self._start_run()

    def _start_run(self) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-P", "-m", "holdfast", "run", "--launcher", self._setup.launcher]
        line += ["-n", str(self._setup.ranks), "--store", str(self.store), "--logs", str(self.logs)]
        line += ["--set", "keep_last=0"]
        line += [word for setting in self._setup.settings for word in ("--set", setting)]
        line += [*self._restart_options(), *self._setup.options, "--", *self._setup.command]
        return self._start(line, {**self._env, "HOLDFAST_STORE": str(self.store)})

    def _restart_options(self) -> Sequence[str]:
        """Options that limit how often the job is restarted."""
        return () if self._kills else ("--crashes-max", "1", "--set-aside-max", "0")

    def __enter__(self) -> DrillRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:  # its own children are tied to it
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._output.close()
        for follower in self._followers.values():
            follower.close()

    def poll(self) -> tuple[bool, Mapping[str, list[dict[str, Any]]]]:
        """Return whether the run has ended, and the new lines of `diary`, `events` and `status`."""
        ended = self.exit_code is not None  # check before reading, so that no last line is missed
        new: dict[str, list[dict[str, Any]]] = {}
        for name, follower in self._followers.items():
            new[name] = []
            while more := list(follower.read()):
                new[name] += more
        new["status"] += self._derive_status(new)
        for name, lines in new.items():
            self.lines[name] += lines
        return ended, new

    def _derive_status(self, new: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Derive lines of status from new lines, if no process writes status.jsonl. May add fields to the lines."""
        del new
        return []

    @property
    def exit_code(self) -> int | None:
        """Exit code of the job; None while it runs."""
        return self._process.poll()

    def kill(self, kill: Kill) -> bool:
        """Send SIGKILL. Return whether there was a process to kill."""
        match kill.target:
            case KillTarget.RANK:
                return self._signal(self._rank_pids(kill.rank), signal.SIGKILL)
            case KillTarget.RANKS:
                return self._signal(self._all_rank_pids(), signal.SIGKILL)
            case KillTarget.STAGER:
                return self._signal([*self._stager_pids(), *self._all_rank_pids()], signal.SIGKILL)
            case KillTarget.LAUNCHER:
                return self._signal(self._launcher_pids(), signal.SIGKILL)
            case KillTarget.WRAPPER:
                parents = [parent for pid in self._rank_pids(kill.rank) if (parent := parent_of(pid)) > 1]
                return self._signal(parents, signal.SIGKILL)

    def send_notice(self, kill: Kill) -> bool:
        """Send SIGTERM to the rank of the kill. Return whether the rank was running."""
        return self._signal(self._rank_pids(kill.rank), signal.SIGTERM)

    def output_tail(self, lines: int) -> str:
        """Return the last lines of the run's output."""
        return _last_lines((self.folder / "output.log").read_text(errors="replace"), lines)

    def output_before_failure(self) -> str:
        """Return the last lines before torchrun reports a failed rank; without torchrun, the last lines of all."""
        text = (self.folder / "output.log").read_text(errors="replace")
        return _last_lines(_TORCHRUN_FAILS.split(text, maxsplit=1)[0], _OUTPUT_LINES)

    def _start(self, line: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Tied to this process: a killed drill leaves no process behind.
        return subprocess.Popen(
            tied_command(line), stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, env=env
        )

    def _rank_pids(self, rank: int) -> list[int]:
        begun = [line for line in self.lines["diary"] if "begins" in line and line.get("rank") == rank]
        return [int(begun[-1]["pid"])] if begun else []

    def _all_rank_pids(self) -> list[int]:
        return [pid for rank in range(self._setup.ranks) for pid in self._rank_pids(rank)]

    def _launcher_pids(self) -> list[int]:
        return [pid for pid in running_processes() if parent_of(pid) == self._process.pid]

    def _stager_pids(self) -> list[int]:
        launchers = self._launcher_pids()
        session = [pid for launcher in launchers for pid in processes_of_session(launcher)]
        return [pid for pid in session if pid not in launchers and is_stager(pid)]

    @staticmethod
    def _signal(pids: Sequence[int], number: signal.Signals) -> bool:
        sent = False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                sent = True
        return sent


def _last_lines(text: str, count: int) -> str:
    return "\n".join(text.splitlines()[-count:])


def is_stager(pid: int) -> bool:
    """Whether this process is a stager itself, not its wrapper."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"stager" in words and b"operator_side.supervise.rank" not in words
    return False


def sleep_briefly(deadline: float) -> None:
    """Sleep for a moment. Raises `PeerLost` after the deadline."""
    if time.monotonic() > deadline:
        raise PeerLost("the drill took longer than --seconds-max; raise it, or give the script fewer steps")
    time.sleep(0.01)
