"""One `holdfast run --launcher torchrun` of a drill; torchrun restarts workers, the drill a command without torchrun.

    strike ─► one rank, all ranks ─► torchrun starts its workers again   (--restarts-max)
              torchrun            ─► the command ends; another one resumes from the store
              stager and ranks    ─► another stager at the same address; torchrun starts its workers again

Nobody writes a `status.jsonl` here: `Starts` makes the lines of the diary and of the events of restores.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.process import parent_of
from operator_side.drill.drill_run import DrillRun, Setup, is_stager
from operator_side.drill.kill_plan import Kill, KillTarget

# torchrun sends SIGTERM to the workers that are left when one has died. Where that is a notice they wait for a step
# that does not come; a drill has no use for the 30 seconds that they are given.
_GRACE_SECONDS = 5


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
    """See the module; as `DrillRun`."""

    def __init__(self, setup: Setup, folder: Path, *, kills: int) -> None:
        self._starts = Starts(setup.ranks)
        self._may_start_again = False
        super().__init__(setup, folder, kills=kills)

    def _limits(self) -> Sequence[str]:
        # A kill may cost a second restart, of those that it leaves alone.
        return ("--restarts-max", str(2 * self._kills), "--grace-seconds", str(_GRACE_SECONDS))

    @property
    def exit_code(self) -> int | None:
        """As `DrillRun`. A command whose torchrun was killed on purpose is started again."""
        code = self._process.poll()
        if code and self._may_start_again:
            self._may_start_again = False
            self._process = self._start_run()
            return None
        return code

    def _heard(self, new: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return self._starts.hear(new["diary"], new["events"])

    def strike(self, kill: Kill) -> bool:
        """As `DrillRun`."""
        match kill.target:
            case KillTarget.LAUNCHER | KillTarget.WRAPPER:
                self._may_start_again = True
                return self._signal(self._launcher(), signal.SIGKILL)
            case _:
                return super().strike(kill)

    def _launcher(self) -> list[int]:
        """The torchrun, which is the parent of the ranks."""
        parents = {parent_of(rank) for rank in self._ranks()}
        return [parent for parent in parents if parent > 1]

    def _stager(self) -> list[int]:
        return [pid for pid in super()._launcher() if is_stager(pid)]
