"""Which samples come next, exactly, after a restart on any number of ranks.

    epoch e, seed s ─► order (a permutation computed place by place, nothing is stored or replayed)
    order:   0 1 2 │ 3 4 5 │ 6 7 8 │ …            one global batch = ranks x batch size
                   ▲ cursor: samples of this epoch that were handed to the loop, of all ranks together

The cursor is global, so a run that resumes with other ranks goes on at the same sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from holdfast.errors import StateError

__all__ = ["ResumableSampler"]

_Batch = TypeVar("_Batch")
_ROUNDS = 8


class ResumableSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its samples; at most once per epoch each, whatever happens in between.

    Put it into the state of the `Checkpointer`. Take samples in the loop itself, through one of

    * `batches(n)`: endless; `next()` gives this rank's indices for one step,
    * `iter(sampler)`: one index at a time, endless,
    * `follow(loader, n)`: for a `DataLoader(batch_sampler=sampler.ahead(n))` whose workers read ahead.

    What was handed out counts as trained on: save after the step, as `Checkpointer.step` does. What a loader merely
    read ahead does not count. At the end of an epoch the samples that do not fill a global batch are left out.

    Args:
        length: Number of samples of the data set.
        seed: Of the order; the same on every rank.
        rank: This rank.
        ranks: Number of ranks.
        shuffle: False takes the samples in order.
    """

    def __init__(self, length: int, *, seed: int, rank: int, ranks: int, shuffle: bool = True) -> None:
        if length <= 0 or not 0 <= rank < ranks <= length:
            raise StateError(
                f"sampler: {length} samples for rank {rank} of {ranks}; each rank needs at least one sample"
            )
        self._length, self._seed, self._rank, self._ranks = length, seed, rank, ranks
        self._shuffle = shuffle
        self._epoch = 0
        self._cursor = 0

    @property
    def epoch(self) -> int:
        """The epoch of the sample that comes next, from 0."""
        return self._next_batch(1, self._epoch, self._cursor)[0]

    def __len__(self) -> int:
        return self._length // self._ranks

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches(1):
            yield batch[0]

    def batches(self, batch_size: int) -> Iterator[list[int]]:
        """This rank's indices of one step after the other, across epochs, without end; moves the cursor."""
        while True:
            epoch, cursor = self._next_batch(batch_size, self._epoch, self._cursor)
            self._epoch, self._cursor = epoch, cursor + batch_size * self._ranks
            yield self._indices(batch_size, epoch, cursor)

    def ahead(self, batch_size: int) -> Iterator[list[int]]:
        """The same indices as `batches` gives, without moving the cursor: for a `DataLoader` that reads ahead."""
        epoch, cursor = self._epoch, self._cursor
        while True:
            epoch, cursor = self._next_batch(batch_size, epoch, cursor)
            yield self._indices(batch_size, epoch, cursor)
            cursor += batch_size * self._ranks

    def follow(self, loader: Iterable[_Batch], batch_size: int) -> Iterator[_Batch]:
        """The batches of `loader`, which reads `ahead(batch_size)`; the cursor moves as the loop gets them."""
        for batch, _ in zip(loader, self.batches(batch_size), strict=False):
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where we are; the same on every rank."""
        return {"epoch": self._epoch, "cursor": self._cursor, "length": self._length, "seed": self._seed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on there, also with another number of ranks. Iterators made before must not be used further.

        Raises:
            StateError: The data set or the seed is another one: the order would not be the same.
        """
        for name, mine in (("length", self._length), ("seed", self._seed)):
            if saved.get(name) != mine:
                raise StateError(
                    f"sampler: the checkpoint was made with {name} {saved.get(name)!r}, this run has {mine}; "
                    "samples would be repeated or left out. Use the same data set and seed, "
                    "or leave the sampler out of the state to begin a new order"
                )
        self._epoch, self._cursor = int(saved["epoch"]), int(saved["cursor"])

    def _next_batch(self, batch_size: int, epoch: int, cursor: int) -> tuple[int, int]:
        """Epoch and cursor where the next global batch begins."""
        global_batch = batch_size * self._ranks
        if not 0 < global_batch <= self._length:
            raise StateError(
                f"sampler: {self._ranks} ranks of batch size {batch_size} need {global_batch} samples per step, "
                f"the data set has {self._length}"
            )
        return (epoch, cursor) if cursor + global_batch <= self._length else (epoch + 1, 0)

    def _indices(self, batch_size: int, epoch: int, cursor: int) -> list[int]:
        first = cursor + self._rank * batch_size
        places = range(first, first + batch_size)
        if not self._shuffle:
            return list(places)
        key = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
        return [_permuted(place, self._length, key) for place in places]


def _permuted(place: int, length: int, key: bytes) -> int:
    """Where `place` goes in a permutation of `range(length)` that `key` names.

    A Feistel network shuffles the next larger power of four; places that fall outside walk on until they are inside.
    """
    half = max(1, (length - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for round_ in range(_ROUNDS):
            message = right.to_bytes(8, "little") + bytes([round_])
            digest = hashlib.blake2b(message, digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        place = left << half | right
        if place < length:
            return place
