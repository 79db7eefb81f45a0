"""`ResumableStream`: samples of a source that has no length and no index, but a `state_dict()`.

source:   a b c d │ e f g h │ …       rank 0 takes a b, rank 1 takes c d; then e f and g h
                  ▲ the source's state_dict() is the same on every rank, for any number of ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from holdfast.errors import StateError
from trainer_side.data.skipped_samples import SkippedSamples, StepSizeCounter
from trainer_side.opaque import OpaqueIterator, opaque_methods
from trainer_side.state.data_place import DataPlace
from trainer_side.state.rng import isolated_rng
from trainer_side.state.value_crc import ValueCrc
from trainer_side.whole_number import whole_number


class _Source(Protocol):
    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@opaque_methods
class ResumableStream(DataPlace):
    """Gives each rank its part of an iterable that every rank reads whole: each sample once per pass, on any ranks.

    Put it into the state of the `Checkpointer`. Every rank reads all samples and keeps its own, which costs reading
    time but keeps the order exact. If reading is slow, use a `StatefulDataLoader(data, batch_size=None, num_workers=…)`
    as the source.

    Args:
        source: Iterable whose `state_dict()` is the place after its last sample. Iterating continues from that place,
            and starts over after the end. The samples and their order must be the same on every rank.
        rank: Number of this rank, from 0.
        ranks: Number of ranks.

    Raises:
        StateError: `rank` is not one of `ranks`, or `source` has no state.
    """

    def __init__(self, source: _Source, *, rank: int, ranks: int) -> None:
        rank = whole_number(rank, "stream: rank", error=StateError)
        ranks = whole_number(ranks, "stream: ranks", least=1, error=StateError)
        if rank >= ranks:
            raise StateError(f"stream: expected a rank from 0 to ranks - 1, got {rank=}, {ranks=}")
        if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
            raise StateError(
                f"stream: {type(source).__name__} has no state_dict() and load_state_dict(), so it cannot resume "
                "after a restart; give it both methods, or use ResumableSampler"
            )
        self._source, self._rank, self._ranks = source, rank, ranks
        self._iterator: Iterator[Any] | None = None
        self._passes = 0
        self._samples_read = 0  # since the state was loaded; `_skipped` counts from there
        self._skipped, self._step_size = SkippedSamples(), StepSizeCounter()

    @property
    def passes(self) -> int:
        """How many times the source was exhausted."""
        return self._passes

    def batches(self, batch_size: int) -> Iterator[list[Any]]:
        """Return an endless iterator over this rank's samples, one list per step. A batch may span two passes."""
        size = whole_number(batch_size, "stream: batch_size", least=1, error=StateError)
        return OpaqueIterator(self._batches(size))

    def _batches(self, batch_size: int) -> Iterator[list[Any]]:
        mine = range(self._rank * batch_size, (self._rank + 1) * batch_size)
        while True:
            samples = (self._next() for _ in range(batch_size * self._ranks))
            batch = [sample for number, sample in enumerate(samples) if number in mine]
            self._step_size.add_batch(batch_size * self._ranks)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next sample; the same on every rank."""
        state = {"source": self._source.state_dict(), "passes": self._passes, "workers": self._workers}
        if self._step_size.size is not None:
            state["step"] = list(self._step_size.size)
        if skipped := self._skipped.spans_after(self._samples_read):
            read = self._samples_read
            state["skipped"] = [[max(0, first - read), end - read] for first, end in skipped]
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at the place in `saved`, also with another number of ranks or another batch size.

        Raises:
            StateError: The source was read by another number of workers, on which the order of samples depends.
        """
        if saved["workers"] != self._workers:
            raise StateError(
                f"stream: expected {saved['workers']} workers, as in the checkpoint, got {self._workers}: the order of "
                f"samples depends on their number; make the loader with num_workers={saved['workers']}"
            )
        self._source.load_state_dict(saved["source"])
        self._passes, self._iterator, self._samples_read = int(saved["passes"]), None, 0
        self._skipped = SkippedSamples((first, end) for first, end in saved.get("skipped", ()))
        self._step_size = StepSizeCounter(saved.get("step"), step=None)

    def stepped(self, step: int) -> None:
        """As `ResumableSampler.stepped`."""
        self._step_size.stepped(step)

    def skip_batches(self, after: int, steps: int) -> None:
        """As `ResumableSampler.skip_batches`, but skipped samples are read from the source and dropped."""
        samples, batches = self._step_size.require_size("stream")
        begin = self._skipped.begin(self._skipped.end(self._samples_read, after * batches * samples))
        end = self._skipped.end(begin, steps * batches * samples)
        self._skipped = SkippedSamples([*self._skipped.spans, (begin, end)])

    def mark_place(self) -> None:
        """Do nothing: places of the source are opaque, so `place` has no `from`."""

    def place(self) -> dict[str, Any]:
        """Return the number of passes and the CRC-32 of the source's place."""
        return {"passes": self._passes, "crc": ValueCrc(self._source.state_dict()).value()}

    @property
    def _workers(self) -> int:
        return int(getattr(self._source, "num_workers", 0))

    def _next(self) -> Any:
        for _ in range(self._skipped.begin(self._samples_read) - self._samples_read):
            self._read_one()
        return self._read_one()

    def _read_one(self) -> Any:
        self._samples_read += 1
        if self._iterator is None:
            self._iterator = self._open_iterator()
        # One try for this pass, one for a source that was restored at its very end, and one for the next pass.
        for _ in range(3):
            for sample in self._iterator:
                return sample
            self._passes += 1
            self._iterator = self._open_iterator()
        raise StateError(
            f"stream: {type(self._source).__name__} gave no samples in three passes; check the data that it reads"
        )

    def _open_iterator(self) -> Iterator[Any]:
        with isolated_rng(f"stream/{self._passes}"):
            return iter(self._source)
