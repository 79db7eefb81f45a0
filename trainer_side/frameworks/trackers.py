"""Experiment trackers: the run of W&B, TensorBoard or MLflow resumes after a restart, with marks about checkpoints.

    with Checkpointer(state, every=100) as checkpointer:
        first = checkpointer.restore()
        tracker = start_wandb(checkpointer, project="gpt")  # on every rank, after restore()
        for step in range(first, steps):
            …
            tracker.log({"loss": loss.item()}, step)
            checkpointer.step(step)

Each checkpoint has the id of the run. docs/trackers.md says what each tracker shows, and what it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer_side.checkpointer import Checkpointer
from trainer_side.frameworks.missing import missing_framework
from trainer_side.trackers import mlflow_tracker, tensorboard_tracker, wandb_tracker
from trainer_side.trackers.tracker import Mark, StartPoint, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Mark", "StartPoint", "Tracker", "start_mlflow", "start_tensorboard", "start_wandb"]


def start_wandb(checkpointer: Checkpointer, **init: Any) -> Tracker:
    """Start the run of W&B, or resume the one in the restored checkpoint. Every rank, after `restore()`.

    A run that is already active (`wandb.run`) is used unchanged.

    Args:
        checkpointer: The Checkpointer of this process.
        init: Arguments for `wandb.init`. `id` and `resume` come from the checkpoint.

    Returns:
        The tracker. `run` is the run of W&B on rank 0, and None elsewhere; `log` does nothing there.

    Raises:
        ConfigError: `restore()` was not called; or W&B is not installed.
    """
    return _track("wandb", checkpointer, partial(wandb_tracker.begin, options=init))


def start_tensorboard(
    checkpointer: Checkpointer,
    log_dir: str | None = None,
    *,
    writer: SummaryWriter | None = None,
    **options: Any,
) -> Tracker:
    """Make a `SummaryWriter` that continues in the folder of the restored checkpoint. Every rank, after `restore()`.

    Points of steps that are trained again are hidden; their files stay.

    Args:
        checkpointer: The Checkpointer of this process.
        log_dir: The folder of a new run, or of a run whose folder is gone. None: as `SummaryWriter` chooses.
        writer: An existing writer, such as a framework's, to use in place of a new one.
        options: Further arguments of `SummaryWriter`.

    Returns:
        The tracker. `run` is the writer on rank 0, and None elsewhere; `log` does nothing there.

    Raises:
        ConfigError: `restore()` was not called; or TensorBoard is not installed.
    """
    begin = partial(tensorboard_tracker.begin, log_dir=log_dir, options=options)
    if writer is not None:
        begin = partial(tensorboard_tracker.begin_with_writer, writer=writer)
    return _track("tensorboard", checkpointer, begin)


def start_mlflow(checkpointer: Checkpointer, **start_run: Any) -> Tracker:
    """Start the run of MLflow, or resume the one in the restored checkpoint. Every rank, after `restore()`.

    A run that is already active (`mlflow.active_run()`) is used unchanged.

    Args:
        checkpointer: The Checkpointer of this process.
        start_run: Arguments for `mlflow.start_run`. `run_id` comes from the checkpoint.

    Returns:
        The tracker. `run` is the run of MLflow on rank 0, and None elsewhere; `log` does nothing there.

    Raises:
        ConfigError: `restore()` was not called; or MLflow is not installed.
    """
    return _track("mlflow", checkpointer, partial(mlflow_tracker.begin, options=start_run))


def _track(library: str, checkpointer: Checkpointer, begin: Callable[[StartPoint], Tracker]) -> Tracker:
    try:
        return checkpointer.track(begin)
    except ImportError as error:
        raise missing_framework(library, error, module="trackers", extra="trackers") from error
