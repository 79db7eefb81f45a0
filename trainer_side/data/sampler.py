"""Which samples come next, exactly, after a restart on any number of ranks.

    epoch e, seed s ─► order (permutation.py: computed place by place, nothing is stored or replayed)
    order:   0 1 2 │ 3 4 5 │ 6 7 8 │ 9 ┊ 0 1 │ 2 3 …      one global batch = ranks x batch size
                   ▲ cursor             ┊ the next epoch begins inside a batch: no sample is left out or repeated

    sampler.ahead(n) ─► workers of a loader, prefetch ─► sampler.follow(loader) ─► loop     the cursor moves here alone

The cursor counts the samples of this epoch that the loops of all ranks have got. It is global, so a run that resumes
with other ranks goes on at the same sample.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, Never, TypeVar

import torch

from holdfast import supervised as diary
from holdfast.errors import StateError
from trainer_side.data.permutation import Permutation
from trainer_side.state.rng import apart

_log = logging.getLogger("holdfast.data")
_Batch = TypeVar("_Batch")
_Indices = list[int] | list[tuple[int, int]]
_ORDER = "feistel-24"  # an order that is made otherwise gets another name, and does not pass for this one


class _Position(NamedTuple):
    """Where the next global batch begins: the epoch, and how many of its samples were taken."""

    epoch: int
    cursor: int


class ResumableSampler:
    """Gives each rank its samples: each exactly once per epoch, however often the run is interrupted.

    Put it into the state of the `Checkpointer`, and take samples in the loop through one of

    * `batches(n)`: `next()` gives this rank's indices for one step,
    * `follow(loader)`: the batches of a `DataLoader(data, batch_sampler=sampler.ahead(n))`, which reads ahead.

    Both are endless, and all ranks take equally many batches of equal size. What the loop was given counts as trained
    on: save after the step, as `Checkpointer.step` does. What a loader has read ahead does not count. docs/data.md says
    more.

    Args:
        length: Number of samples of the data set.
        seed: Of the order; the same on every rank.
        rank: This rank.
        ranks: Number of ranks.
        shuffle: False takes the samples in order.
        drop_last: An epoch ends before its last samples, where they do not fill a global batch: at most once instead of
            exactly once, and each epoch begins with a batch.
        on_change: When the checkpoint was made with another length, seed or order: refuse it, or leave out what is left
            of its epoch and go on with the next one.

    Raises:
        StateError: No samples, or a rank that is not among the ranks.
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int,
        rank: int,
        ranks: int,
        shuffle: bool = True,
        drop_last: bool = False,
        on_change: Literal["refuse", "next-epoch"] = "refuse",
    ) -> None:
        if length <= 0 or not 0 <= rank < ranks:
            raise StateError(
                f"sampler: expected samples, and a rank below ranks; got {length=}, {rank=}, {ranks=}"
            )
        if on_change not in ("refuse", "next-epoch"):
            raise StateError(f"sampler: on_change is 'refuse' or 'next-epoch', got {on_change!r}")
        self._length, self._seed, self._rank, self._ranks = int(length), int(seed), rank, ranks
        self._shuffle, self._drop_last, self._on_change = bool(shuffle), drop_last, on_change
        self._position = _Position(0, 0)
        self._loads = 0
        self._read_ahead = self._followed = False

    @property
    def epoch(self) -> int:
        """The epoch of the sample that comes next, from 0."""
        return self._span(1, self._position)[0].epoch

    def __iter__(self) -> Never:
        # As a loader's `sampler` it would not see what the loop has got.
        raise StateError(
            "sampler: not to be iterated: give the loader `batch_sampler=sampler.ahead(batch_size)` in place of "
            "`sampler` and `batch_size`, and loop over `sampler.follow(loader)`; without a loader, `sampler.batches`"
        )

    def batches(self, batch_size: int) -> Iterator[list[int]]:
        """This rank's indices of one step after the other, across epochs, without end; moves the cursor."""
        while True:
            begin, end = self._span(batch_size, self._position)
            self._position = end
            self._note(batch_size, begin)
            yield [index for _, index in self._samples(batch_size, begin)]

    def ahead(self, batch_size: int, *, epochs: bool = False) -> ReadAhead:
        """The same batches without moving the cursor: `batch_sampler` of a loader that reads ahead.

        Args:
            batch_size: Samples of this rank in a step.
            epochs: Pairs of epoch and index in place of the index alone, for `SeededSamples`.
        """
        return ReadAhead(self, batch_size, epochs=epochs)

    def follow(self, loader: Iterable[_Batch], batch_size: int | None = None) -> Iterator[_Batch]:
        """The batches of a loader that reads `ahead`, for the loop; the cursor moves as the loop gets them.

        Beginning it leaves torch's random numbers as they are, so that a run that resumes draws the same ones.

        Args:
            loader: `DataLoader`, `StatefulDataLoader`, or what wraps one.
            batch_size: Samples of this rank in a batch, where the loader does not tell.

        Raises:
            StateError: The loader takes its samples from elsewhere, in another number, or not in order.
        """
        found = self._batch_size(loader)
        if batch_size is None and found is None:
            raise StateError(
                f"sampler: {type(loader).__name__} does not tell its batch size: follow(loader, batch_size)"
            )
        if batch_size is not None and found is not None and batch_size != found:
            raise StateError(
                f"sampler: follow() was told batches of {batch_size}, the loader reads batches of {found}"
            )
        return self._following(loader, found or batch_size or 0)

    def state_dict(self) -> dict[str, Any]:
        """Where we are; the same on every rank.

        Raises:
            StateError: A loader reads ahead, and nothing tells what of it the loop has got.
        """
        if self._read_ahead and not self._followed:
            raise StateError(
                "sampler: a loader has read ahead, but the loop does not say what it got: loop over "
                "`sampler.follow(loader)`; or put the StatefulDataLoader into the state in place of the sampler"
            )
        return self._described(self._position)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on there, also with another number of ranks or another batch size.

        Raises:
            StateError: It was made with another length, seed or order; or it is not the state of a sampler.
        """
        self._position = self._found(saved)
        self._loads += 1
        self._read_ahead = self._followed = False

    def _following(self, loader: Iterable[_Batch], batch_size: int) -> Iterator[_Batch]:
        self._followed = True
        with apart(f"{self._seed}/{self._position}/{self._rank}"):
            iterator = iter(loader)
        expected = self._position
        for batch in iterator:
            if self._position != expected:
                raise StateError(
                    f"sampler: a loader was followed from {tuple(expected)} (epoch, cursor), but the sampler is at "
                    f"{tuple(self._position)}: begin follow() after restore(), and let one loop alone take samples"
                )
            begin, expected = self._span(batch_size, expected)
            self._position = expected
            self._note(batch_size, begin)
            yield batch

    def _note(self, batch_size: int, begin: _Position) -> None:
        """For `holdfast drill`: which samples the loop gets."""
        place = begin.cursor + self._rank * batch_size
        diary.note("samples", [begin.epoch, place, batch_size, self._length])

    def _batch_size(self, loader: Any) -> int | None:
        """Of the batches that `loader` reads; None if it does not tell."""
        if not getattr(loader, "in_order", True):
            raise StateError(
                "sampler: a loader with in_order=False gives batches in any order; leave in_order=True"
            )
        reads = getattr(loader, "batch_sampler", None)
        if isinstance(reads, ReadAhead) and reads.sampler is self:
            return reads.batch_size
        if isinstance(loader, torch.utils.data.DataLoader) or isinstance(reads, ReadAhead):
            raise StateError(
                f"sampler: this {type(loader).__name__} takes its samples from elsewhere; "
                "make it with batch_sampler=sampler.ahead(batch_size) of this sampler"
            )
        return None

    def _described(self, position: _Position) -> dict[str, Any]:
        return {
            "epoch": position.epoch,
            "cursor": position.cursor,
            "length": self._length,
            "seed": self._seed,
            "order": _ORDER if self._shuffle else "as it is",
        }

    def _found(self, saved: Any) -> _Position:
        """The place that a sampler's state names, if it is one in these data; else as `on_change` says."""
        mine = self._described(self._position)
        if not isinstance(saved, dict) or not set(mine) <= set(saved):
            raise StateError(
                f"sampler: expected a dict with {', '.join(mine)}, the checkpoint has {saved!r}; "
                "give the sampler the name in the state with which it was saved, and the release of holdfast"
            )
        place: tuple[Any, Any] = saved["epoch"], saved["cursor"]
        if not all(isinstance(number, int) and number >= 0 for number in place) or place[1] > saved["length"]:
            raise StateError(
                f"sampler: epoch {place[0]!r}, cursor {place[1]!r} is no place in {saved['length']!r} samples; "
                "take the checkpoint before"
            )
        found = _Position(*place)
        changed = [name for name in ("length", "seed", "order") if saved[name] != mine[name]]
        if not changed:
            return found
        said = "; ".join(f"{name}: expected {saved[name]!r}, got {mine[name]!r}" for name in changed)
        if self._on_change == "refuse":
            raise StateError(
                f"sampler: this run does not have the data of the checkpoint: {said}; samples would be repeated or "
                "left out. Use the same data set, seed and shuffle, or make the sampler with on_change='next-epoch' to "
                f"leave the rest of epoch {found.epoch} and begin the next one with the new data"
            )
        left = max(0, saved["length"] - found.cursor)
        _log.warning("sampler: %s: epoch %d ends here, with %d samples left", said, found.epoch, left)
        return _Position(found.epoch + 1, 0)

    def _span(self, batch_size: int, position: _Position) -> tuple[_Position, _Position]:
        """Where the next global batch begins, and where it ends."""
        global_batch = batch_size * self._ranks
        if batch_size < 1 or (self._drop_last and global_batch > self._length):
            raise StateError(
                f"sampler: {self._ranks} ranks of batch size {batch_size} need {global_batch} samples per step, "
                f"the data set has {self._length}"
            )
        if not self._drop_last:
            epochs, cursor = divmod(position.cursor + global_batch, self._length)
            return position, _Position(position.epoch + epochs, cursor)
        begin = (
            position if position.cursor + global_batch <= self._length else _Position(position.epoch + 1, 0)
        )
        return begin, _Position(begin.epoch, begin.cursor + global_batch)

    def _samples(self, batch_size: int, begin: _Position) -> list[tuple[int, int]]:
        """This rank's samples of the global batch that begins there: epoch and index of each."""
        place, left = begin.cursor + self._rank * batch_size, batch_size
        samples: list[tuple[int, int]] = []
        while left:
            epochs, first = divmod(place, self._length)
            epoch, count = begin.epoch + epochs, min(left, self._length - first)
            samples += [(epoch, index) for index in self._order(epoch, first, count)]
            place, left = place + count, left - count
        return samples

    def _order(self, epoch: int, first: int, count: int) -> Iterable[int]:
        if not self._shuffle:
            return range(first, first + count)
        return Permutation(self._length, f"{self._seed}/{epoch}").at(first, count)


class ReadAhead(torch.utils.data.Sampler[Any]):
    """The batches of a `ResumableSampler` for a loader. Each time it is iterated it begins where the loop has got to.

    A `StatefulDataLoader` keeps the place of its iterator in its own state.
    """

    def __init__(self, sampler: ResumableSampler, batch_size: int, *, epochs: bool) -> None:
        self.sampler, self.batch_size, self._epochs = sampler, batch_size, epochs
        sampler._span(batch_size, _Position(0, 0))  # a wrong size is named here, and not by a loader's worker

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches that the samples of an epoch fill; at least one."""
        return max(1, self.sampler._length // (self.sampler._ranks * self.batch_size))

    def __iter__(self) -> _BatchReader:
        return _BatchReader(self.sampler, self.batch_size, epochs=self._epochs)


class _BatchReader(Iterator[_Indices]):
    """One way through the batches, from where the sampler was when it began."""

    def __init__(self, sampler: ResumableSampler, batch_size: int, *, epochs: bool) -> None:
        self._sampler, self._batch_size, self._epochs = sampler, batch_size, epochs
        self._position, self._loads = sampler._position, sampler._loads

    def __next__(self) -> _Indices:
        if self._loads != self._sampler._loads:
            raise StateError(
                "sampler: a checkpoint was loaded after this loader was begun; begin iterating after restore()"
            )
        self._sampler._read_ahead = True
        begin, self._position = self._sampler._span(self._batch_size, self._position)
        samples = self._sampler._samples(self._batch_size, begin)
        return samples if self._epochs else [index for _, index in samples]

    def state_dict(self) -> dict[str, Any]:
        """Behind the batch that was read last: asked for by a `StatefulDataLoader` with each batch."""
        return self._sampler._described(self._position)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on there.

        Raises:
            StateError: As `ResumableSampler.load_state_dict`.
        """
        self._position = self._sampler._found(saved)
