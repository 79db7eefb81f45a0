"""Experiment trackers: W&B, TensorBoard, MLflow."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_side.frameworks.trackers import (
        Mark,
        StartPoint,
        Tracker,
        start_mlflow,
        start_tensorboard,
        start_wandb,
    )
else:
    from holdfast.lazy import lazy_names

    _MODULES = {
        "trainer_side.frameworks.trackers": (
            "Mark",
            "StartPoint",
            "Tracker",
            "start_mlflow",
            "start_tensorboard",
            "start_wandb",
        )
    }
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

__all__ = ["Mark", "StartPoint", "Tracker", "start_mlflow", "start_tensorboard", "start_wandb"]
