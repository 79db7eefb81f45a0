"""Holdfast in the training loops of frameworks: one module for each, which does not import the other frameworks.

    from holdfast.integrations.lightning import HoldfastCallback, HoldfastEnvironment

accelerate     Hugging Face's Accelerate: the state of a plain training loop
epochs         a loader with a length for `ResumableSampler`'s batches, for training loops that count epochs
lightning      PyTorch Lightning: a callback, and the environment of the job
torchtitan     torchtitan's training loop, or a similar one: a checkpoint manager
trackers       experiment trackers: a resumed job continues its run there, with marks about checkpoints
transformers   Hugging Face's Trainer: a callback

Each module re-exports the module of `trainer_side.frameworks` with the same name.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.integrations import accelerate, epochs, lightning, torchtitan, trackers, transformers
else:
    from holdfast.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {},
        submodules=("accelerate", "epochs", "lightning", "torchtitan", "trackers", "transformers"),
    )

__all__ = ["accelerate", "epochs", "lightning", "torchtitan", "trackers", "transformers"]
