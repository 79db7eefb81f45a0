"""Samples that are skipped, because the run was rewound without the batches of some steps. Pure.

place    0 1 2 3 4 5 6 7 8 9 …      number of a sample since the begin of the first epoch
skipped        └─────┘              places 3 to 5
batches  0 1 2 6 │ 7 8 9 …          a batch continues after the skipped places, on any number of ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from holdfast.errors import StateError


class StepSize(NamedTuple):
    """The data of a training step, of all ranks together: `batches` times `samples` samples."""

    samples: int
    batches: int


class StepSizeCounter:
    """Infers the size of a training step from the batches taken between two steps. One thread.

    `size`: As in a sampler's state; None if the state has none.
    """

    def __init__(self, size: Sequence[int] | None = None, *, step: int | None = -1) -> None:
        self.size = None if size is None else StepSize(*size)  # the newest known size; None: not known yet
        self._batches, self._samples = 0, 0
        self._last_step = None if step is None else (step, 0)

    def add_batch(self, samples: int) -> None:
        """Count a global batch of `samples` samples."""
        self._batches, self._samples = self._batches + 1, samples

    def stepped(self, step: int) -> None:
        """Note the end of a training step."""
        before, self._last_step = self._last_step, (step, self._batches)
        if before is not None and step > before[0]:
            batches, rest = divmod(self._batches - before[1], step - before[0])
            if batches and not rest:
                self.size = StepSize(self._samples, batches)

    def require_size(self, what: str) -> StepSize:
        """Return the size of a step. Raises `StateError` if it is unknown."""
        if self.size is None:
            raise StateError(
                f"{what}: batches must be skipped, but the checkpoint does not say how many samples a step takes: "
                "an older release made it, or it was saved before a step was done; rewind to a later checkpoint, or "
                "without --skip-batches"
            )
        return self.size


class SkippedSamples:
    """Skipped spans of places, each as first place and end, in order and disjoint."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        merged: list[tuple[int, int]] = []
        for first, end in sorted(spans):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            elif first < end:
                merged.append((first, end))
        self.spans = tuple(merged)

    def begin(self, place: int) -> int:
        """Return the first place from `place` on that is not skipped."""
        return next((end for first, end in self.spans if first <= place < end), place)

    def end(self, place: int, count: int) -> int:
        """Return the place after the next `count` samples from `place` on."""
        for first, number in self.runs(place, count):
            place = first + number
        return place

    def count(self, place: int, end: int) -> int:
        """Return how many places from `place` up to `end` are not skipped."""
        skipped = sum(max(0, min(end, last) - max(place, first)) for first, last in self.spans)
        return max(0, end - place - skipped)

    def runs(self, place: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the next `count` samples as runs between skipped spans: first place and number."""
        for first, end in self.spans:
            if place < first:
                number = min(count, first - place)
                yield place, number
                place, count = place + number, count - number
                if not count:
                    return
            place = max(place, end)
        if count:
            yield place, count

    def spans_after(self, place: int) -> list[list[int]]:
        """Return the spans that end after `place`, for a state."""
        return [[first, end] for first, end in self.spans if end > place]
