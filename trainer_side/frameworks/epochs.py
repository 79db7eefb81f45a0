"""A loader with a length, of `ResumableSampler`'s endless batches: for loops that want to count epochs.

DataLoader(batch_sampler=sampler.ahead(n)) ─► EpochLoader ─► the framework's loop: len() batches are an epoch
                                                  │ the sampler's cursor moves as the loop gets them
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from holdfast.errors import StateError
from trainer_side.data.sampler import ReadAhead, ResumableSampler

__all__ = ["EpochLoader"]


class EpochLoader:
    """The batches of a loader that reads `sampler.ahead(...)`, from where the sampler is, with the length of an epoch.

    An iteration does not end by itself: the loop stops at the length, less what was done of the epoch before a restart.
    Without `drop_last` a sampler's epoch may end inside a batch: `len()` batches are then a little less than one.

    Args:
        loader: Made with `batch_sampler=sampler.ahead(batch_size)`.
        batches: Length in place of the whole batches that the samples of an epoch fill.

    Raises:
        StateError: The loader takes its samples from elsewhere.
    """

    def __init__(self, loader: DataLoader[Any], *, batches: int | None = None) -> None:
        reads = loader.batch_sampler
        if not isinstance(reads, ReadAhead):
            raise StateError(
                f"EpochLoader: this loader takes its samples from {type(reads).__name__}; make it with "
                "batch_sampler=sampler.ahead(batch_size) of a ResumableSampler"
            )
        self._loader = loader
        self._sampler: ResumableSampler = reads.sampler
        self._batches = batches or reads.batches_per_epoch

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        return self._sampler.follow(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is."""
        return self._sampler.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on there, with the next iteration."""
        self._sampler.load_state_dict(saved)
