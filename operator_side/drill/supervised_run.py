"""One `holdfast run` of a drill."""

from __future__ import annotations

import contextlib
import signal
import sys
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
        line = [
            sys.executable,
            "-P",
            "-m",
            "holdfast",
            "run",
            "-n",
            str(setup.ranks),
            "--store",
            str(self.store),
        ]
        line += ["--logs", str(self.logs), "--set", "keep_last=0"]
        line += [word for setting in setup.settings for word in ("--set", setting)]
        line += [] if kills else ["--crashes-max", "1", "--set-aside-max", "0"]
        line += [*setup.options, "--", *setup.command]
        self._process = self._start(line, {**self._env, "HOLDFAST_STORE": str(self.store)})

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
                return self._signal(self._mpirun(), signal.SIGKILL)
            case KillTarget.WRAPPER:
                parents = [parent for pid in self._rank(kill.rank) if (parent := parent_of(pid)) > 1]
                return self._signal(parents, signal.SIGKILL)

    def _mpirun(self) -> list[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if parent_of(pid) == self._process.pid]

    def _stager(self) -> list[int]:
        session = [pid for mpirun in self._mpirun() for pid in processes_of_session(mpirun)]
        found = []
        for pid in session:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"stager" in words and b"operator_side.supervise.rank" not in words:
                    found.append(pid)
        return [pid for pid in found if pid not in self._mpirun()]
