"""TensorBoard: event files in one folder, in which a resumed training hides the points that it logs again.

attempt 1: 0 … 29 … 37, killed      attempt 2, from step 29: "older points from step 30 on are void", 30 …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_side.trackers.tracker import Mark, StartPoint, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

KIND = "tensorboard"


class TensorboardTracker(Tracker):
    """The folder of a `SummaryWriter`, which already hides the points that are logged again."""

    kind = KIND

    def __init__(self, writer: SummaryWriter) -> None:
        self.run = self._writer = writer
        folder = writer.log_dir
        self.run_id = folder if "://" in folder else str(Path(folder).absolute())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def mark(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            self._writer.add_scalar(mark.title, mark.value, mark.step)
            if mark.text:
                self._writer.add_text(f"{mark.title}/text", mark.text, mark.step)

    def flush(self) -> None:
        self._writer.flush()


def begin(start: StartPoint, log_dir: str | None, options: Mapping[str, Any]) -> TensorboardTracker:
    """Write into the folder in the checkpoint, if it exists; else into `log_dir`."""
    from torch.utils.tensorboard import SummaryWriter

    saved = start.runs.get(KIND)
    if saved is not None and (log_dir is None or "://" in saved or Path(saved).is_dir()):
        log_dir = saved
    return TensorboardTracker(SummaryWriter(log_dir=log_dir, **{"purge_step": start.first_step, **options}))


def begin_with_writer(start: StartPoint, writer: SummaryWriter) -> TensorboardTracker:
    """Hide, in the folder of `writer`, the points of steps that are trained again."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    tracker, first = TensorboardTracker(writer), start.first_step
    files: Any = writer.file_writer
    files.add_event(Event(step=first, file_version="brain.Event:2"))
    files.add_event(Event(step=first, session_log=SessionLog(status=SessionLog.START)))
    return tracker
