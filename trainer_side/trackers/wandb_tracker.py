"""W&B: one run for all attempts, whose steps only grow.

    online   the server knows the last step; W&B itself drops points of older steps
    offline  each attempt has its own folder; folders of earlier attempts have the logged steps

An offline run's file has a header of 7 bytes (":W&B", magic, version), then blocks of 32 KiB, of pieces: CRC, length,
kind. The pieces make records, which are protocol buffers of wandb's own module. A killed process may leave the last
record truncated; the records before it count.

Marks are about past steps, so they have their own axis. They join the open row of metrics and never close it, because
W&B would drop the next metrics that the script logs for the same step.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_side.trackers.tracker import PREFIX, Mark, StartPoint, Tracker

if TYPE_CHECKING:
    import wandb

KIND = "wandb"
_AXIS = f"{PREFIX}_step"
# Limits how much of an offline run is lost with its process; W&B's default is 15 s.
_FLUSH, _FLUSH_SECONDS = "x_transaction_log_flush_interval", 1.0
_MAGIC, _HEADER_BYTES = b":W&B", 7
_BLOCK_BYTES = 32 << 10
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4

_log = logging.getLogger("holdfast.trainer")


class WandbTracker(Tracker):
    """A run: result of `wandb.init`. `last_step`: Its newest step.

    `first_step`: The step to run first, for an offline run, which W&B counts from 0 again.
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


def newest_logged_step(run: wandb.Run) -> int:
    """Return the newest step of `run` in the folders of earlier attempts, next to its own; -1 without one."""
    own = Path(run.dir).parent
    newest = -1
    for file in own.parent.glob(f"*run-*/run-{run.id}.wandb"):
        if file.parent.resolve() != own.resolve():
            try:
                newest = max(newest, *_steps(file.read_bytes()), -1)
            except Exception as error:  # noqa: BLE001 - another version of W&B may write another format
                _log.warning(
                    "W&B: %s cannot be read, so steps in it may be logged twice: %s: %s",
                    file,
                    type(error).__name__,
                    error,
                )
    return newest


def _steps(data: bytes) -> Iterator[int]:
    from wandb.proto.wandb_internal_pb2 import Record

    for body in _records(data):
        record = Record.FromString(body)
        if record.WhichOneof("record_type") == "history":
            yield int(record.history.step.num)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file."""
    if data[: len(_MAGIC)] != _MAGIC:
        return
    at, begun = _HEADER_BYTES, b""
    while at + _PIECE.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _PIECE.size:
            at += left
            continue
        _, nbytes, kind = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        piece = data[at : at + nbytes]
        if kind == 0 or len(piece) < nbytes:
            return
        begun = piece if kind in (_WHOLE, _FIRST) else begun + piece
        at += nbytes
        if kind in (_WHOLE, _LAST):
            yield begun
