"""`ResumableSampler`: the samples of each rank, resumed exactly after a restart on any number of ranks.

    epoch e, seed s ─► order (permutation.py: computed place by place, nothing is stored or replayed)
    order:   0 1 2 │ 3 4 5 │ 6 7 8 │ 9 ┊ 0 1 │ 2 3 …      one global batch = ranks x batch size
                   ▲ cursor             ┊ the next epoch begins inside a batch: no sample is skipped or repeated

    sampler.ahead(n) ─► workers of a loader, prefetch ─► sampler.follow(loader) ─► loop    `follow` moves the cursor

The cursor counts the samples of this epoch that the training loops of all ranks have received. The cursor is global, so
a run that resumes with another number of ranks continues at the same sample. After `holdfast rewind --skip-batches` the
cursor jumps over the samples of skipped steps (skipped_samples.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, Never, TypeVar

import torch

from holdfast import supervised as diary
from holdfast.errors import StateError
from trainer_side.data.permutation import Permutation
from trainer_side.data.skipped_samples import SkippedSamples, StepSizeCounter
from trainer_side.opaque import OpaqueIterator, opaque_methods
from trainer_side.state.data_place import DataPlace
from trainer_side.state.rng import isolated_rng
from trainer_side.whole_number import describe_value, whole_number

_log = logging.getLogger("holdfast.data")
_Batch = TypeVar("_Batch")
_Indices = list[int] | list[tuple[int, int]]
_ORDER = "feistel-24"  # a change of the order needs another name, so that older checkpoints are refused


class _Position(NamedTuple):
    """The place where the next global batch begins: the epoch, and the number of its samples already taken."""

    epoch: int
    cursor: int


class _LateStart:
    """The start of a loader at the first batch of its wrapper, as timm's prefetcher does it.

    torch draws the seed of the workers from training's generator, after it has made the iterator of the batch sampler
    and before it reads it. A resumed run starts once more than an uninterrupted one, and must not draw more numbers.
    """

    def __init__(self) -> None:
        self._before: torch.Tensor | None = None

    def save(self) -> None:
        if self._before is None:  # a loader with workers makes that iterator twice
            self._before = torch.get_rng_state()

    def undo(self) -> None:
        if self._before is not None:
            torch.set_rng_state(self._before)


@opaque_methods
class ResumableSampler(DataPlace):
    """Gives each rank its samples: each sample exactly once per epoch, however often the run is interrupted.

    Put it into the state of the `Checkpointer`, and take samples in the training loop through one of

    * `batches(n)`: `next()` gives this rank's indices for one step,
    * `follow(loader)`: the batches of a `DataLoader(data, batch_sampler=sampler.ahead(n))`, which reads ahead.

    Both are endless, and all ranks take equally many batches of equal size. A sample counts as trained on as soon as
    the loop has received it, so save after the step, as `Checkpointer.step` does. Samples that a loader has read ahead
    do not count. docs/data.md says more.

    Args:
        length: Number of samples of the data set.
        seed: Seed of the order. Must be the same on every rank.
        rank: Number of this rank, from 0.
        ranks: Number of ranks.
        shuffle: Whether to shuffle the samples. False: the order of the data set.
        drop_last: Skip the last samples of an epoch if they do not fill a global batch. Each sample then comes at most
            once per epoch instead of exactly once, and each epoch begins with a new batch.
        on_change: Handling of a checkpoint that was made with another length, seed or order: `refuse` it, or skip the
            rest of its epoch and continue with the `next-epoch`.

    Raises:
        StateError: There are no samples, or `rank` is not one of `ranks`.
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
        length, rank, ranks = (
            whole_number(number, f"sampler: {name}", least=least, error=StateError)
            for name, number, least in (("length", length, 1), ("rank", rank, 0), ("ranks", ranks, 1))
        )
        if rank >= ranks:
            raise StateError(f"sampler: expected a rank from 0 to ranks - 1, got {rank=}, {ranks=}")
        seed = whole_number(seed, "sampler: seed", least=None, error=StateError)
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(flag, bool):
                raise StateError(f"sampler: {name}: expected True or False, got {describe_value(flag)}")
        if on_change not in ("refuse", "next-epoch"):
            raise StateError(f"sampler: on_change: expected 'refuse' or 'next-epoch', got {on_change!r}")
        self._length, self._seed, self._rank, self._ranks = length, seed, rank, ranks
        self._shuffle, self._drop_last, self._on_change = shuffle, drop_last, on_change
        self._position = self._mark = _Position(0, 0)
        self._skipped, self._step_size = SkippedSamples(), StepSizeCounter()
        self._load_count = 0
        self._read_ahead = self._followed = False
        self._late_start: _LateStart | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self._span(1, self._position)[0].epoch

    def __iter__(self) -> Never:
        # A loader with this object as its `sampler` reads ahead, and cannot tell which samples the loop has received.
        raise StateError(
            "sampler: a ResumableSampler cannot be iterated: give the loader `batch_sampler=sampler.ahead(batch_size)` "
            "in place of `sampler` and `batch_size`, and loop over `sampler.follow(loader)`; without a loader, loop "
            "over `sampler.batches(batch_size)`"
        )

    def batches(self, batch_size: int) -> Iterator[list[int]]:
        """Return an endless iterator over this rank's indices, one list per step; `next()` moves the cursor."""
        return OpaqueIterator(self._batches(_check_batch_size(batch_size)))

    def _batches(self, batch_size: int) -> Iterator[list[int]]:
        while True:
            begin, end = self._span(batch_size, self._position)
            self._position = end
            self._count_batch(batch_size, begin)
            yield [index for _, index in self._samples(batch_size, begin)]

    def ahead(self, batch_size: int, *, epochs: bool = False) -> ReadAhead:
        """Return the `batch_sampler` of a loader that reads ahead: yields the same batches, and keeps the cursor.

        Args:
            batch_size: Number of samples of this rank in a step.
            epochs: Yield pairs of epoch and index instead of indices, for `SeededSamples`.
        """
        return ReadAhead(self, _check_batch_size(batch_size), epochs=epochs)

    def follow(self, loader: Iterable[_Batch], batch_size: int | None = None) -> Iterator[_Batch]:
        """Iterate over the batches of a loader that reads `ahead`; the cursor moves with each batch that the loop gets.

        Starting the iteration does not change torch's random state, so a resumed run draws the same numbers.

        Args:
            loader: A `DataLoader`, a `StatefulDataLoader`, or a wrapper of one.
            batch_size: Number of samples of this rank in a batch. Needed only if the loader does not have it.

        Raises:
            StateError: The loader takes its samples from elsewhere, with another batch size, or out of order.
        """
        found = self._batch_size(loader)
        size = found if batch_size is None else _check_batch_size(batch_size)
        if size is None:
            raise StateError(
                f"sampler: {type(loader).__name__} does not tell its batch size; call follow(loader, batch_size)"
            )
        if found not in (None, size):
            raise StateError(
                f"sampler: follow(): batch_size is {batch_size}, but the loader reads batches of {found}; "
                "give both the same number"
            )
        return OpaqueIterator(self._follow(loader, size))

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next sample; the same on every rank.

        Raises:
            StateError: A loader has read ahead, but the loop does not use `follow`.
        """
        if self._read_ahead and not self._followed:
            raise StateError(
                "sampler: a loader has read ahead, and it is unknown which batches the loop has received; loop over "
                "`sampler.follow(loader)`, or put the StatefulDataLoader into the state in place of the sampler"
            )
        return self._state_at(self._position)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at the place in `saved`, also with another number of ranks or another batch size.

        Raises:
            StateError: `saved` was made with another length, seed or order, or is not the state of a sampler.
        """
        self._position, self._skipped = self._parse_state(saved)
        self._mark = self._position
        self._step_size = StepSizeCounter(saved.get("step"), step=None)
        self._load_count += 1
        self._read_ahead = self._followed = False

    def mark_place(self) -> None:
        """Remember the place, for the proof of a resume."""
        self._mark = self._position

    def place(self) -> dict[str, Any]:
        """Return the place of the next sample now and at the mark: epoch and sample."""
        return {"from": list(self._mark), "to": list(self._position)}

    def shared_settings(self) -> dict[str, Any]:
        """Return what decides the order and the global batch."""
        order = _ORDER if self._shuffle else "as it is"
        return {
            "length": self._length,
            "seed": self._seed,
            "order": order,
            "ranks": self._ranks,
            "drop_last": self._drop_last,
        }

    def stepped(self, step: int) -> None:
        """Note the end of a training step, to learn how many batches a step takes. `Checkpointer` calls this."""
        self._step_size.stepped(step)

    def skip_batches(self, after: int, steps: int) -> None:
        """Skip the batches of `steps` training steps, after those of the next `after` steps.

        `Checkpointer.restore` calls this after `holdfast rewind --skip-batches`. The samples per step are those of the
        checkpoint, so that the same samples are skipped on any number of ranks.

        Raises:
            StateError: The checkpoint does not say how many samples a step takes.
        """
        samples, batches = self._step_size.require_size("sampler")
        position = self._position
        begins = []
        for number in (after * batches, steps * batches):
            for _ in range(number):
                _, position = self._next(samples, position)
            position, _ = self._next(samples, position)
            begins.append(self._place_of(position))
        self._skipped = SkippedSamples([*self._skipped.spans, (begins[0], begins[1])])
        self._load_count += 1  # makes iterators that have read ahead raise

    def _follow(self, loader: Iterable[_Batch], batch_size: int) -> Iterator[_Batch]:
        self._followed = True
        with isolated_rng(f"{self._seed}/{self._position}/{self._rank}"):
            iterator = iter(loader)
        expected, self._late_start = self._position, _LateStart()
        for batch in iterator:
            self._late_start = None
            if self._position != expected:
                raise StateError(
                    f"sampler: follow() expected the sampler at epoch and cursor {tuple(expected)}, it is at "
                    f"{tuple(self._position)}; call follow() after restore(), and let only one loop take samples"
                )
            begin, expected = self._span(batch_size, expected)
            self._position = expected
            self._count_batch(batch_size, begin)
            yield batch

    def _count_batch(self, batch_size: int, begin: _Position) -> None:
        """Note the samples that the loop receives, also for `holdfast drill`."""
        self._step_size.add_batch(batch_size * self._ranks)
        place = begin.cursor + self._rank * batch_size
        diary.write_diary("samples", [begin.epoch, place, batch_size, self._length])

    def _batch_size(self, loader: Any) -> int | None:
        """Return the size of the batches that `loader` reads; None if the loader does not have it."""
        if not getattr(loader, "in_order", True):
            raise StateError(
                "sampler: the loader has in_order=False and gives batches in any order; make it with in_order=True"
            )
        batch_sampler = getattr(loader, "batch_sampler", None)
        if isinstance(batch_sampler, ReadAhead) and batch_sampler.sampler is self:
            return batch_sampler.batch_size
        if isinstance(loader, torch.utils.data.DataLoader) or isinstance(batch_sampler, ReadAhead):
            raise StateError(
                f"sampler: this {type(loader).__name__} takes its samples from elsewhere; "
                "make it with batch_sampler=sampler.ahead(batch_size) of this sampler"
            )
        return None

    def _state_at(self, position: _Position) -> dict[str, Any]:
        state = self._state_fields(position)
        if self._step_size.size is not None:
            state["step"] = list(self._step_size.size)
        if skipped := self._skipped.spans_after(self._place_of(position)):
            state["skipped"] = skipped
        return state

    def _state_fields(self, position: _Position) -> dict[str, Any]:
        return {
            "epoch": position.epoch,
            "cursor": position.cursor,
            "length": self._length,
            "seed": self._seed,
            "order": _ORDER if self._shuffle else "as it is",
        }

    def _parse_state(self, saved: Any) -> tuple[_Position, SkippedSamples]:
        """Return the place in a saved state, and its skipped samples. If the data differ, `on_change` decides."""
        own = self._state_fields(self._position)
        if not isinstance(saved, dict) or not set(own) <= set(saved):
            raise StateError(
                f"sampler: expected a dict with {', '.join(own)}, the checkpoint has {saved!r}; give the sampler the "
                "name in the state with which it was saved, and use the release of holdfast that saved it"
            )
        place: tuple[Any, Any] = saved["epoch"], saved["cursor"]
        if not all(isinstance(number, int) and number >= 0 for number in place) or place[1] > saved["length"]:
            raise StateError(
                f"sampler: epoch {place[0]!r}, cursor {place[1]!r} is no place in {saved['length']!r} samples; "
                "take the checkpoint before this one"
            )
        found = _Position(*place)
        changed = [name for name in ("length", "seed", "order") if saved[name] != own[name]]
        if not changed:
            return found, SkippedSamples((first, end) for first, end in saved.get("skipped", ()))
        changes = "; ".join(f"{name}: expected {saved[name]!r}, got {own[name]!r}" for name in changed)
        if self._on_change == "refuse":
            raise StateError(
                f"sampler: this run does not have the data of the checkpoint: {changes}; samples would be repeated or "
                "left out. Use the same data set, seed and shuffle, or make the sampler with on_change='next-epoch' to "
                f"leave the rest of epoch {found.epoch} and begin the next one with the new data"
            )
        left = max(0, saved["length"] - found.cursor)
        _log.warning(
            "sampler: the data have changed since the checkpoint (%s): epoch %d ends with %d samples left out, and the "
            "next epoch begins with the new data",
            changes,
            found.epoch,
            left,
        )
        return _Position(found.epoch + 1, 0), SkippedSamples()

    def _span(self, batch_size: int, position: _Position) -> tuple[_Position, _Position]:
        """Return the begin and the end of the next global batch."""
        global_batch = batch_size * self._ranks
        if batch_size < 1 or (self._drop_last and global_batch > self._length):
            raise StateError(
                f"sampler: {self._ranks} ranks of batch size {batch_size} need {global_batch} samples per step, "
                f"the data set has {self._length}"
            )
        return self._next(global_batch, position)

    def _next(self, samples: int, position: _Position) -> tuple[_Position, _Position]:
        """Return the begin and the end of the next `samples` samples that make up one global batch."""
        skipped, place = self._skipped, self._skipped.begin(self._place_of(position))
        if not self._drop_last:
            return self._position_at(place), self._position_at(skipped.end(place, samples))
        while skipped.count(place, ends := (place // self._length + 1) * self._length) < samples:
            place = skipped.begin(ends)
        begin = self._position_at(place)
        return begin, _Position(begin.epoch, skipped.end(place, samples) - begin.epoch * self._length)

    def _place_of(self, position: _Position) -> int:
        return position.epoch * self._length + position.cursor

    def _position_at(self, place: int) -> _Position:
        return _Position(*divmod(place, self._length))

    def _samples(self, batch_size: int, begin: _Position) -> list[tuple[int, int]]:
        """Return epoch and index of each of this rank's samples in the global batch that begins at `begin`."""
        mine = self._skipped.end(self._place_of(begin), self._rank * batch_size)
        samples: list[tuple[int, int]] = []
        for place, left in self._skipped.runs(mine, batch_size):
            while left:
                epoch, first = divmod(place, self._length)
                count = min(left, self._length - first)
                samples += [(epoch, index) for index in self._order(epoch, first, count)]
                place, left = place + count, left - count
        return samples

    def _order(self, epoch: int, first: int, count: int) -> Iterable[int]:
        if not self._shuffle:
            return range(first, first + count)
        return Permutation(self._length, f"{self._seed}/{epoch}").at(first, count)


def _check_batch_size(batch_size: int) -> int:
    return whole_number(batch_size, "sampler: batch_size", least=1, error=StateError)


@opaque_methods
class ReadAhead(torch.utils.data.Sampler[Any]):
    """Batches of a `ResumableSampler` for a loader; each iteration begins at the place that the loop has reached.

    A `StatefulDataLoader` keeps the place of its iterator in its own state.
    """

    def __init__(self, sampler: ResumableSampler, batch_size: int, *, epochs: bool) -> None:
        self.sampler, self.batch_size, self._epochs = sampler, batch_size, epochs
        # A wrong size raises here, not in a loader's worker.
        sampler._span(batch_size, _Position(0, 0))

    @property
    def batches_per_epoch(self) -> int:
        """Number of whole batches that the samples of an epoch fill; at least one."""
        return max(1, self.sampler._length // (self.sampler._ranks * self.batch_size))

    def __iter__(self) -> _BatchReader:
        return _BatchReader(self.sampler, self.batch_size, epochs=self._epochs)


@opaque_methods
class _BatchReader(Iterator[_Indices]):
    """One iteration over the batches, from the sampler's place when the iteration began."""

    def __init__(self, sampler: ResumableSampler, batch_size: int, *, epochs: bool) -> None:
        self._sampler, self._batch_size, self._epochs = sampler, batch_size, epochs
        self._position, self._load_count = sampler._position, sampler._load_count
        if (late := sampler._late_start) is not None:
            late.save()

    def __next__(self) -> _Indices:
        if (late := self._sampler._late_start) is not None:
            late.undo()
            self._sampler._late_start = None
        if self._load_count != self._sampler._load_count:
            raise StateError(
                "sampler: a checkpoint was loaded after the iteration over this loader had begun; begin to iterate "
                "after restore()"
            )
        self._sampler._read_ahead = True
        begin, self._position = self._sampler._span(self._batch_size, self._position)
        samples = self._sampler._samples(self._batch_size, begin)
        return samples if self._epochs else [index for _, index in samples]

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch read. A `StatefulDataLoader` calls this with each batch."""
        return self._sampler._state_at(self._position)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at the place in `saved`.

        Raises:
            StateError: As `ResumableSampler.load_state_dict`.
        """
        self._position, _ = self._sampler._parse_state(saved)
