"""One `holdfast run --launcher torchrun` of a drill. torchrun restarts workers; the drill restarts a lost torchrun.

    kill   ─► one rank, all ranks ─► torchrun restarts its workers   (--restarts-max)
              torchrun            ─► the command ends; the drill starts it again, and it resumes from the store
              stager and ranks    ─► another stager at the same address; torchrun restarts its workers

No process writes a `status.jsonl` here: `StartTracker` derives its lines from the diary and the events' restores.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.process import parent_of
from operator_side.drill.drill_run import DrillRun, DrillSetup, is_stager
from operator_side.drill.kill_plan import Kill, KillTarget

# torchrun sends SIGTERM to the surviving workers when one has died. If SIGTERM is a notice, they wait for a step that
# never comes; a drill gains nothing from the default 30 seconds.
_GRACE_SECONDS = 5


class StartTracker:
    """Derives the lines that `holdfast run` would write: restored, training; and numbers the starts. Pure."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pids: dict[int, list[int]] = {}  # rank → its processes so far
        self._trained: set[int] = set()
        self._is_training = False

    def add_attempt(self, line: dict[str, Any]) -> None:
        """Add the number of the process's start to a line of the diary."""
        pids = self._pids.setdefault(int(line["rank"]), [])
        if line["pid"] not in pids:
            pids.append(line["pid"])
            if self._is_training:
                self._is_training, self._trained = False, set()
        line["attempt"] = 1 + pids.index(line["pid"])

    def derive_status(
        self, diary: Iterable[dict[str, Any]], events: Iterable[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the lines of status that follow from new lines of the diary and of the events."""
        restored = {
            line["step"]: {"time": line["time"], "event": "restored", "step": line["step"]}
            for line in events
            if line.get("event") == "restore" and "step" in line
        }
        lines: list[dict[str, Any]] = list(restored.values())
        for line in diary:
            self.add_attempt(line)
            newest = self._pids[line["rank"]][-1]
            if "step" not in line or line["pid"] != newest or self._is_training:
                continue
            self._trained.add(line["rank"])
            if len(self._trained) == self._ranks:
                self._is_training = True
                message = f"start {line['attempt']}: every rank trains, at step {line['step']}"
                lines.append({"time": line["time"], "event": "training", "message": message})
        return lines


class TorchrunRun(DrillRun):
    """A running `holdfast run --launcher torchrun`; as `DrillRun`."""

    def __init__(self, setup: DrillSetup, folder: Path, *, kills: int) -> None:
        self._start_tracker = StartTracker(setup.ranks)
        self._may_restart = False
        super().__init__(setup, folder, kills=kills)

    def _restart_options(self) -> Sequence[str]:
        # A kill may cost a second restart, for the ranks that survived it.
        return ("--restarts-max", str(2 * self._kills), "--grace-seconds", str(_GRACE_SECONDS))

    @property
    def exit_code(self) -> int | None:
        """As `DrillRun`. Restarts the command once if its torchrun was killed on purpose."""
        code = self._process.poll()
        if code and self._may_restart:
            self._may_restart = False
            self._process = self._start_run()
            return None
        return code

    def _derive_status(self, new: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return self._start_tracker.derive_status(new["diary"], new["events"])

    def kill(self, kill: Kill) -> bool:
        if kill.target not in {KillTarget.LAUNCHER, KillTarget.WRAPPER}:
            return super().kill(kill)
        self._may_restart = True
        return self._signal(self._launcher_pids(), signal.SIGKILL)

    def _launcher_pids(self) -> list[int]:
        """Return torchrun, the parent of the ranks."""
        parents = {parent_of(rank) for rank in self._all_rank_pids()}
        return [parent for parent in parents if parent > 1]

    def _stager_pids(self) -> list[int]:
        return [pid for pid in super()._launcher_pids() if is_stager(pid)]
