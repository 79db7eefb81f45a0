"""W&B: one run for all attempts, whose steps only grow.

    online   the server knows the last step; W&B itself drops points of older steps
    offline  each attempt has its own folder; folders of earlier attempts have the logged steps (logged_steps.py)

Marks are about past steps, so they have their own axis. They join the open row of metrics and never close it, because
W&B would drop the next metrics that the script logs for the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer_side.trackers.logged_steps import newest_logged_step
from trainer_side.trackers.mark import PREFIX, Mark
from trainer_side.trackers.start_point import StartPoint
from trainer_side.trackers.tracker import Tracker

if TYPE_CHECKING:
    import wandb

KIND = "wandb"
_AXIS = f"{PREFIX}_step"
# Limits how much of an offline run is lost with its process; W&B's default is 15 s.
_FLUSH, _FLUSH_SECONDS = "x_transaction_log_flush_interval", 1.0

_log = logging.getLogger("holdfast.trainer")


class WandbTracker(Tracker):
    """A run of W&B.

    Args:
        run: Result of `wandb.init`.
        last_step: Its newest step.
        first_step: The step to run first, for an offline run, which W&B counts from 0 again.
    """

    kind = KIND

    def __init__(self, run: wandb.Run, last_step: int, first_step: int = 0) -> None:
        self.run = self._run = run
        self.run_id, self.last_step, self._first_step = run.id, last_step, first_step
        self._deferred: list[Mark] = []
        self._defined: set[str] = set()
        self._row = -1  # the last row that got marks
        self._names_in_row: set[str] = set()  # names of its marks

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step > self.last_step:
            self._run.log(dict(metrics), step=step)

    def mark(self, marks: Sequence[Mark]) -> None:
        self._deferred += marks
        if not self._deferred:
            return
        # A row has one number for each name, and only W&B knows whether the row was closed since.
        if (row := self._run.step) != self._row:
            self._row, self._names_in_row = row, set()
        now = {mark.name: mark for mark in reversed(self._deferred) if mark.name not in self._names_in_row}
        self._deferred = [mark for mark in self._deferred if mark is not now.get(mark.name)]
        self._names_in_row |= now.keys()
        self._log_marks(now.values())

    def end(self) -> None:
        # Another row may not follow: show the newest mark of each name.
        self._log_marks({mark.name: mark for mark in self._deferred}.values())

    def _log_marks(self, marks: Any) -> None:
        row: dict[str, Any] = {}
        for mark in marks:
            axis = f"{_AXIS}/{mark.name}"
            if mark.name not in self._defined:
                self._defined.add(mark.name)
                self._run.define_metric(axis, hidden=True)
                self._run.define_metric(mark.title, step_metric=axis)
            row |= {mark.title: mark.value, axis: mark.step}
            if mark.text:
                self._run.config.update({f"{mark.title}/{mark.value:g}": mark.text}, allow_val_change=True)
        if row:
            step = self._run.step
            self._run.log(row, step=self._first_step if step < self._first_step else None, commit=False)


def begin(start: StartPoint, options: Mapping[str, Any]) -> WandbTracker:
    """Continue the active run, or the one in the checkpoint; else start one."""
    import wandb

    saved, more = start.runs.get(KIND), dict(options)
    if saved is not None and start.branched:
        # W&B can truncate a run only on its server, and only if that feature is enabled.
        more["config"] = {**(more.get("config") or {}), f"{PREFIX}/rewound_from": saved}
    elif saved is not None:
        more = {"id": saved, "resume": "allow", **more}
    if "settings" not in more and _FLUSH in wandb.Settings.model_fields:
        more["settings"] = wandb.Settings(**{_FLUSH: _FLUSH_SECONDS})
    run = wandb.run or wandb.init(**more)
    if saved is not None and not start.branched and run.id != saved:
        _log.warning(
            "W&B: the checkpoint belongs to run %s, but this training continues in run %s, which was started first; "
            "start it after restore(), by start_wandb(), or give each attempt the same id",
            saved,
            run.id,
        )
    last_step = run.starting_step - 1
    if run.offline and saved == run.id:
        last_step = newest_logged_step(run)
    if saved == run.id and -1 < last_step < start.first_step - 1:
        _log.warning(
            "W&B: run %s lacks steps %d to %d: W&B had not written them when the process was killed",
            run.id,
            last_step + 1,
            start.first_step - 1,
        )
    return WandbTracker(run, last_step, start.first_step if run.offline else 0)
