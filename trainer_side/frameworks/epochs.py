"""`EpochLoader`: a loader with a length for `ResumableSampler`'s endless batches, for loops that count epochs.

DataLoader(batch_sampler=sampler.ahead(n)) ─► EpochLoader ─► the framework's loop: len() batches are an epoch
                                                  │ the sampler's cursor moves with each batch that the loop gets
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from holdfast.errors import StateError
from trainer_side.data.sampler import ReadAhead, ResumableSampler
from trainer_side.opaque import opaque_methods

__all__ = ["EpochLoader"]


@opaque_methods
class EpochLoader:
    """Gives a loader that reads `sampler.ahead(...)` the length of an epoch; iterating begins at the sampler's place.

    An iteration is endless: the training loop stops after `len()` batches, less those of this epoch before a restart.
    Without `drop_last` a sampler's epoch may end inside a batch; `len()` batches are then slightly less than an epoch.

    Args:
        loader: A loader made with `batch_sampler=sampler.ahead(batch_size)`.
        batches: Number of batches in an epoch. None: the number of whole batches in the samples of an epoch.

    Raises:
        StateError: The loader takes its samples from elsewhere.
    """

    def __init__(self, loader: DataLoader[Any], *, batches: int | None = None) -> None:
        batch_sampler = loader.batch_sampler
        if not isinstance(batch_sampler, ReadAhead):
            raise StateError(
                f"EpochLoader: this loader takes its samples from {type(batch_sampler).__name__}; make it with "
                "batch_sampler=sampler.ahead(batch_size) of a ResumableSampler"
            )
        self._loader = loader
        self._sampler: ResumableSampler = batch_sampler.sampler
        self._batches = batches or batch_sampler.batches_per_epoch

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        return self._sampler.follow(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's place."""
        return self._sampler.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Let the next iteration begin at the place in `saved`."""
        self._sampler.load_state_dict(saved)

    def stepped(self, step: int) -> None:
        """As `ResumableSampler.stepped`."""
        self._sampler.stepped(step)

    def skip_batches(self, after: int, steps: int) -> None:
        """As `ResumableSampler.skip_batches`."""
        self._sampler.skip_batches(after, steps)
