"""W&B: one run for all attempts, whose steps only grow.

    online   the server knows the last step; W&B itself drops what is logged of older ones
    offline  each attempt has a folder of its own; the folders of attempts before say what was logged (logged_steps.py)

Marks are about steps that are past, so they have an axis of their own. They join the row of metrics that is open, and
never close it: what the script logs of the same step next would be dropped.
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
# How much of an offline run is lost with its process; W&B writes every 15 s otherwise.
_FLUSH, _FLUSH_SECONDS = "x_transaction_log_flush_interval", 1.0

_log = logging.getLogger("holdfast.trainer")


class WandbTracker(Tracker):
    """A run of W&B.

    Args:
        run: As `wandb.init` returned it.
        last_step: The newest step that it has.
        first_step: The step to run first, where W&B does not know it: an offline run counts from 0 again.
    """

    kind = KIND

    def __init__(self, run: wandb.Run, last_step: int, first_step: int = 0) -> None:
        self.run = self._run = run
        self.run_id, self.last_step, self._first_step = run.id, last_step, first_step
        self._put_off: list[Mark] = []
        self._defined: set[str] = set()
        self._row = -1  # the last one that got marks
        self._in_row: set[str] = set()  # their names

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step > self.last_step:
            self._run.log(dict(metrics), step=step)

    def mark(self, marks: Sequence[Mark]) -> None:
        self._put_off += marks
        if not self._put_off:
            return
        # A row has one number of each name, and whether it has been closed since only W&B knows.
        if (row := self._run.step) != self._row:
            self._row, self._in_row = row, set()
        now = {mark.name: mark for mark in reversed(self._put_off) if mark.name not in self._in_row}
        self._put_off = [mark for mark in self._put_off if mark is not now.get(mark.name)]
        self._in_row |= now.keys()
        self._show(now.values())

    def end(self) -> None:
        # No row comes after this one for certain: of each name, the newest is shown.
        self._show({mark.name: mark for mark in self._put_off}.values())

    def _show(self, marks: Any) -> None:
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
    """Go on with the active run, or with the one that the checkpoint names; else begin one."""
    import wandb

    saved, more = start.runs.get(KIND), dict(options)
    if saved is not None and start.branched:
        # W&B truncates a run on its server alone, where that feature is switched on.
        more["config"] = {**(more.get("config") or {}), f"{PREFIX}/rewound_from": saved}
    elif saved is not None:
        more = {"id": saved, "resume": "allow", **more}
    if "settings" not in more and _FLUSH in wandb.Settings.model_fields:
        more["settings"] = wandb.Settings(**{_FLUSH: _FLUSH_SECONDS})
    run = wandb.run or wandb.init(**more)
    if saved is not None and not start.branched and run.id != saved:
        _log.warning(
            "W&B: the checkpoint belongs to run %s, and this training goes on in run %s, which was begun first; begin "
            "it after restore(), by start_wandb(), or give each attempt the same id",
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
