"""A torchrun of a drill, beside a stager that stands alone; torchrun restarts workers, the drill torchrun itself.

    strike ─► one rank, all ranks ─► torchrun starts its workers again   (--max-restarts)
              torchrun            ─► another one, which joins the running stager
              stager and ranks    ─► another stager at the same address; torchrun starts its workers again

Nobody writes a `status.jsonl` here: `Starts` makes the lines of the diary and of the events of restores.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.config import StagerConfig
from holdfast.errors import PeerLost
from holdfast.net.key import new_key
from holdfast.ring.directory import runtime_directory
from operator_side.drill.job import DrillRun, Setup, end
from operator_side.drill.kill_plan import Kill, KillTarget
from operator_side.supervise.flusher import KeptFlusher

_LISTEN_SECONDS_MAX = 120.0
# torchrun sends SIGTERM to the workers that are left when one has died. Where that is a notice they wait for a step
# that does not come; a drill has no use for the 30 seconds that they are given.
_SHUTDOWN_SECONDS = 5
_FLUSH_SECONDS_MAX = 60.0
_ALL_LINES = 1_000_000


class Starts:
    """Says of the lines of ranks what `holdfast run` would: lost, restored, training; and numbers the starts. Pure."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._started: dict[int, list[int]] = {}  # rank → its processes so far
        self._trained: set[int] = set()
        self._is_training = False

    def number(self, line: dict[str, Any]) -> None:
        """Give a line of the diary the number of the start that its process belongs to."""
        pids = self._started.setdefault(int(line["rank"]), [])
        if line["pid"] not in pids:
            pids.append(line["pid"])
            if self._is_training:
                self._is_training, self._trained = False, set()
        line["attempt"] = 1 + pids.index(line["pid"])

    def hear(
        self, diary: Iterable[dict[str, Any]], events: Iterable[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The lines of status that follow from new lines of the diary and of the events."""
        said: list[dict[str, Any]] = []
        restored = {
            line["step"]: {"time": line["time"], "event": "restored", "step": line["step"]}
            for line in events
            if line.get("event") == "restore" and "step" in line
        }
        said += restored.values()
        for line in diary:
            self.number(line)
            newest = self._started[line["rank"]][-1]
            if "step" not in line or line["pid"] != newest or self._is_training:
                continue
            self._trained.add(line["rank"])
            if len(self._trained) == self._ranks:
                self._is_training = True
                message = f"start {line['attempt']}: every rank trains, at step {line['step']}"
                said.append({"time": line["time"], "event": "training", "message": message})
        return said


class TorchrunRun(DrillRun):
    """See the module.

    Args:
        kills: How many restarts there are to be; 0: the first failure ends the run.

    Raises:
        PeerLost: The stager does not come to listen.
    """

    def __init__(self, setup: Setup, folder: Path, *, kills: int) -> None:
        super().__init__(setup, folder)
        self._restarts_max = 2 * kills  # a kill may cost a second one, of those that it leaves alone
        self._starts = Starts(setup.ranks)
        self._key, self._address = new_key(), "127.0.0.1:0"
        self._may_start_again = False
        self._ended: int | None = None
        self.store.mkdir()
        where = StagerConfig.from_sources(store=str(self.store)).runtime_dir
        self._flusher = KeptFlusher(runtime_directory(str(self.store), where))
        self._stager = self._start_stager()
        self._torchrun = self._start_torchrun()

    def _start_stager(self) -> subprocess.Popen[bytes]:
        settings = dict(setting.split("=", 1) for setting in ("keep_last=0", *self._setup.settings))
        own = {f"HOLDFAST_{name.upper()}": value for name, value in settings.items()}
        line = [
            sys.executable,
            "-P",
            "-m",
            "holdfast",
            "stager",
            "--store",
            str(self.store),
            "--listen",
            self._address,
        ]
        before = len(self._listening())
        stager = self._start(line, {**self._env, **own, "HOLDFAST_KEY": self._key})
        deadline = time.monotonic() + _LISTEN_SECONDS_MAX
        while len(found := self._listening()) == before:
            if stager.poll() is not None or time.monotonic() > deadline:
                end(stager)
                raise PeerLost(f"the stager of the drill does not listen: {self.last_words(5)}")
            time.sleep(0.05)
        self._address = found[-1]  # another stager listens at the same one
        return stager

    def _listening(self) -> list[str]:
        return re.findall(r"listens at (\S+);", self.last_words(_ALL_LINES))

    def _start_torchrun(self) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        line += ["--nproc-per-node", str(self._setup.ranks), "--max-restarts", str(self._restarts_max)]
        line += ["--shutdown-timeout", str(_SHUTDOWN_SECONDS), "--no-python", *self._setup.command]
        job = {"HOLDFAST_STAGER": self._address, "HOLDFAST_KEY": self._key}
        return self._start(line, {"OMP_NUM_THREADS": "1", **self._env, **job})

    @property
    def exit_code(self) -> int | None:
        """As `DrillRun`; that of torchrun. A torchrun that was killed on purpose is started again."""
        code = self._torchrun.poll()
        if code is None or self._ended is not None:
            return self._ended
        if code and self._may_start_again:
            self._may_start_again = False
            self._torchrun = self._start_torchrun()
            return None
        self._end_stager()
        self._ended = code
        return code

    def _end(self) -> None:
        end(self._torchrun)
        self._end_stager()

    def _end_stager(self) -> None:
        """Staged checkpoints go into the store first."""
        if self._stager.poll() is None:
            self._flusher.let_go()
            end(self._stager)
            self._flusher.ends_within(_FLUSH_SECONDS_MAX)

    def _heard(self, new: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return self._starts.hear(new["diary"], new["events"])

    def strike(self, kill: Kill) -> bool:
        """As `DrillRun`."""
        match kill.target:
            case KillTarget.RANK:
                return self._signal(self._rank(kill.rank), signal.SIGKILL)
            case KillTarget.RANKS:
                return self._signal(self._ranks(), signal.SIGKILL)
            case KillTarget.STAGER:
                ranks = self._ranks()
                self._stager.kill()
                self._stager.wait()
                found = self._signal(ranks, signal.SIGKILL)
                self._stager = self._start_stager()
                return found
            case KillTarget.LAUNCHER | KillTarget.WRAPPER:
                self._may_start_again = True
                return self._signal([self._torchrun.pid], signal.SIGKILL)
