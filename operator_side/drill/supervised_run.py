"""One `holdfast run` of a drill."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from operator_side.drill.job import DrillRun, Setup, end, parent_of
from operator_side.drill.kill_plan import Kill, KillTarget
from operator_side.supervise.attempt import processes_of_session


class SupervisedRun(DrillRun):
    """`holdfast run`, which restarts the job by itself and writes `status.jsonl`.

    Args:
        kills: How many restarts there are to be; 0: the first failure ends the run.
    """

    def __init__(self, setup: Setup, folder: Path, *, kills: int) -> None:
        super().__init__(setup, folder)
        self._kills = kills
        self._process = self._start_run()

    def _start_run(self) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-P", "-m", "holdfast", "run", "--launcher", self._setup.launcher]
        line += ["-n", str(self._setup.ranks), "--store", str(self.store), "--logs", str(self.logs)]
        line += ["--set", "keep_last=0"]
        line += [word for setting in self._setup.settings for word in ("--set", setting)]
        line += [*self._limits(), *self._setup.options, "--", *self._setup.command]
        return self._start(line, {**self._env, "HOLDFAST_STORE": str(self.store)})

    def _limits(self) -> Sequence[str]:
        """Options that say how often the job is started again."""
        return () if self._kills else ("--crashes-max", "1", "--set-aside-max", "0")

    def _end(self) -> None:
        end(self._process)

    @property
    def exit_code(self) -> int | None:
        """As `DrillRun`."""
        return self._process.poll()

    def strike(self, kill: Kill) -> bool:
        """As `DrillRun`."""
        match kill.target:
            case KillTarget.RANK:
                return self._signal(self._rank(kill.rank), signal.SIGKILL)
            case KillTarget.RANKS:
                return self._signal(self._ranks(), signal.SIGKILL)
            case KillTarget.STAGER:
                return self._signal([*self._stager(), *self._ranks()], signal.SIGKILL)
            case KillTarget.LAUNCHER:
                return self._signal(self._launcher(), signal.SIGKILL)
            case KillTarget.WRAPPER:
                parents = [parent for pid in self._rank(kill.rank) if (parent := parent_of(pid)) > 1]
                return self._signal(parents, signal.SIGKILL)

    def _children(self) -> Iterator[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return (pid for pid in pids if parent_of(pid) == self._process.pid)

    def _launcher(self) -> list[int]:
        return list(self._children())

    def _stager(self) -> list[int]:
        launchers = self._launcher()
        session = [pid for launcher in launchers for pid in processes_of_session(launcher)]
        return [pid for pid in session if pid not in launchers and is_stager(pid)]


def is_stager(pid: int) -> bool:
    """Whether this process is a stager itself, and not the one around it."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"stager" in words and b"operator_side.supervise.rank" not in words
    return False
