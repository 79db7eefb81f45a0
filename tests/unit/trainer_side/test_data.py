"""Every sample at most once per epoch, and after a restart on any number of ranks the next one comes next."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StateError
from trainer_side.data import ResumableSampler


def _steps(samplers: list[ResumableSampler], batch_size: int, steps: int) -> list[list[int]]:
    """For each step, the samples of all ranks."""
    iterators = [sampler.batches(batch_size) for sampler in samplers]
    return [
        list(itertools.chain.from_iterable(next(iterator) for iterator in iterators)) for _ in range(steps)
    ]


def _ranks(length: int, ranks: int, seed: int = 5, *, shuffle: bool = True) -> list[ResumableSampler]:
    return [
        ResumableSampler(length, seed=seed, rank=rank, ranks=ranks, shuffle=shuffle) for rank in range(ranks)
    ]


@given(length=st.integers(1, 70), seed=st.integers(0, 1 << 40))
def test_an_epoch_is_a_permutation(length: int, seed: int) -> None:
    (sampler,) = _ranks(length, 1, seed)
    epochs = [[next(batch)[0] for _ in range(length)] for batch in [sampler.batches(1)] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(length))] * 2
    if length > 20:
        assert epochs[0] != epochs[1]
        assert epochs[0] != list(range(length))


def test_the_order_is_the_same_for_ever() -> None:
    # A checkpoint of today must go on tomorrow, on another machine.
    (sampler,) = _ranks(10, 1, seed=1)
    assert [batch[0] for batch in itertools.islice(sampler.batches(1), 10)] == [4, 1, 2, 6, 7, 3, 5, 8, 9, 0]


@given(
    before=st.integers(1, 4), after=st.integers(1, 4), batch_size=st.integers(1, 3), steps=st.integers(0, 20)
)
def test_a_resumed_run_goes_on_with_the_next_sample(
    before: int, after: int, batch_size: int, steps: int
) -> None:
    length = 48
    old = _ranks(length, before)
    done = _steps(old, batch_size, steps)
    saved = old[0].state_dict()
    assert all(sampler.state_dict() == saved for sampler in old), "the same on every rank"
    new = _ranks(length, after)
    for sampler in new:
        sampler.load_state_dict(saved)
    more = _steps(new, batch_size, length // (after * batch_size))
    if before == after:
        assert done + more == _steps(_ranks(length, before), batch_size, steps + len(more))
    epoch = saved["epoch"]
    steps_of_epoch = length // (before * batch_size)
    seen = list(itertools.chain.from_iterable(done[epoch * steps_of_epoch :]))
    left = (length - saved["cursor"]) // (after * batch_size)
    seen += itertools.chain.from_iterable(more[:left])
    assert len(seen) == len(set(seen)), "at most once per epoch"


def test_in_order_without_shuffling() -> None:
    assert _steps(_ranks(10, 2, shuffle=False), 2, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_a_very_long_data_set_costs_nothing() -> None:
    sampler = ResumableSampler(10**12, seed=0, rank=3, ranks=8)
    sampler.load_state_dict({"epoch": 2, "cursor": 10**11, "length": 10**12, "seed": 0})
    batch = next(sampler.batches(4))
    assert len(set(batch)) == 4
    assert all(0 <= index < 10**12 for index in batch)
    assert sampler.state_dict()["cursor"] == 10**11 + 32


def test_single_indices_are_those_of_batches_of_one() -> None:
    one, other = _ranks(20, 1) + _ranks(20, 1)
    assert list(itertools.islice(iter(one), 30)) == [
        batch[0] for batch in itertools.islice(other.batches(1), 30)
    ]
    assert one.state_dict() == other.state_dict()
    assert one.epoch == 1
    assert len(one) == 20


def test_what_a_loader_reads_ahead_does_not_count() -> None:
    sampler, reference = _ranks(24, 1) + _ranks(24, 1)
    samples = torch.utils.data.TensorDataset(torch.arange(24))
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        samples, batch_sampler=sampler.ahead(4)
    )
    batches = sampler.follow(loader, 4)
    expected = reference.batches(4)
    for step in range(8):
        assert next(batches)[0].tolist() == next(expected)
        assert sampler.state_dict() == reference.state_dict(), step


def test_reading_ahead_of_the_loop_leaves_the_cursor() -> None:
    (sampler,) = _ranks(24, 1)
    list(itertools.islice(sampler.ahead(4), 5))
    assert sampler.state_dict()["cursor"] == 0


@pytest.mark.parametrize(("length", "seed", "named"), [(11, 5, "length 11"), (10, 6, "seed 6")])
def test_another_data_set_is_refused(length: int, seed: int, named: str) -> None:
    (saved,) = _ranks(length, 1, seed)
    (sampler,) = _ranks(10, 1)
    with pytest.raises(StateError, match=named):
        sampler.load_state_dict(saved.state_dict())


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(StateError, match="each rank needs at least one sample"):
        ResumableSampler(1, seed=0, rank=0, ranks=2)
    with pytest.raises(StateError, match="need 12 samples per step"):
        next(_ranks(10, 2)[0].batches(6))
