"""A stream that all ranks share: each sample once per pass, over any interruptions, on any number of ranks."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StateError
from trainer_side.data.stream import ResumableStream
from trainer_side.state.rng import RngState

SAMPLES = 23


class _Counting(torch.utils.data.IterableDataset[int]):
    """Numbers from 0, each worker those of its own; its state is its place."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples, self._next = samples, 0

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self._next * workers + number < self._samples:
            self._next += 1
            yield (self._next - 1) * workers + number
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._next = state_dict["next"]


def _source(workers: int) -> Any:
    if not workers:
        return _Counting()
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return torchdata.StatefulDataLoader(_Counting(), batch_size=None, num_workers=workers)


def _step(loops: list[Iterator[list[int]]]) -> list[int]:
    return list(itertools.chain.from_iterable(map(next, loops)))


@given(
    attempts=st.lists(
        st.tuples(st.sampled_from([4, 3, 5, 1]), st.integers(1, 4), st.integers(0, 6), st.integers(0, 2)),
        max_size=5,
    )
)
def test_killed_anywhere_on_any_ranks_it_takes_each_sample_once(
    attempts: list[tuple[int, int, int, int]],
) -> None:
    saved: dict[str, Any] | None = None
    counted: list[int] = []
    for ranks, batch_size, steps, lost in attempts:
        streams = [ResumableStream(_Counting(), rank=rank, ranks=ranks) for rank in range(ranks)]
        for stream in streams:
            if saved is not None:
                stream.load_state_dict(saved)
        loops = [stream.batches(batch_size) for stream in streams]
        for _ in range(steps):
            counted += _step(loops)
        saved = streams[0].state_dict()
        assert all(stream.state_dict() == saved for stream in streams), "the same on every rank"
        for _ in range(lost):
            _step(loops)
    assert counted == [number % SAMPLES for number in range(len(counted))]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_read_ahead(workers: int) -> None:
    """And random numbers of the loop go on as in a run that was never interrupted."""
    saved: Any = None
    counted: list[int] = []
    torch.manual_seed(1)
    rng, drawn = RngState().state_dict(), []
    for ranks, steps in ((2, 3), (1, 12), (3, 5)):
        streams = [ResumableStream(_source(workers), rank=rank, ranks=ranks) for rank in range(ranks)]
        for stream in streams:
            if saved is not None:
                stream.load_state_dict(saved)
        RngState().load_state_dict(rng)
        loops = [stream.batches(2) for stream in streams]
        for _ in range(steps):
            counted += _step(loops)
            drawn.append(torch.rand(1).item())
        file = io.BytesIO()
        torch.save([streams[0].state_dict(), RngState().state_dict()], file)
        file.seek(0)
        saved, rng = torch.load(file, weights_only=True)
        _step(loops)
    passes = [counted[first : first + SAMPLES] for first in range(0, len(counted), SAMPLES)]
    assert len(counted) > 2 * SAMPLES
    assert [sorted(one) for one in passes[:-1]] == [list(range(SAMPLES))] * (len(passes) - 1)
    assert passes[-1] == passes[0][: len(passes[-1])]
    torch.manual_seed(1)
    assert drawn == [torch.rand(1).item() for _ in drawn]


def test_a_place_that_is_loaded_holds_for_a_loop_that_has_begun() -> None:
    stream = ResumableStream(_source(0), rank=0, ranks=1)
    saved, batches = stream.state_dict(), stream.batches(4)
    assert next(batches) == [0, 1, 2, 3]
    stream.load_state_dict(saved)
    assert next(batches) == [0, 1, 2, 3]


def test_other_workers_are_refused() -> None:
    stream = ResumableStream(_source(2), rank=0, ranks=1)
    with pytest.raises(StateError, match="expected 1 workers, as in the checkpoint, got 2"):
        stream.load_state_dict({"source": {}, "passes": 0, "workers": 1})


def test_passes_are_counted() -> None:
    stream = ResumableStream(_Counting(4), rank=1, ranks=2)
    batches = stream.batches(1)
    assert [(next(batches), stream.passes) for _ in range(4)] == [([1], 0), ([3], 0), ([1], 1), ([3], 1)]


def test_a_stream_that_cannot_go_on_is_refused() -> None:
    with pytest.raises(StateError, match=r"list has no state_dict\(\)"):
        ResumableStream([1, 2], rank=0, ranks=1)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="rank from 0 to ranks - 1"):
        ResumableStream(_Counting(), rank=1, ranks=1)
    with pytest.raises(StateError, match="stream: batch_size: expected a whole number of at least 1"):
        next(ResumableStream(_Counting(), rank=0, ranks=1).batches(0))
    with pytest.raises(StateError, match="_Counting gave no samples"):
        next(ResumableStream(_Counting(0), rank=0, ranks=1).batches(1))
