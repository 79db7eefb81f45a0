"""Each sample appears exactly once per epoch: over any interruptions, any number of ranks, any read-ahead."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from holdfast.errors import StateError
from trainer_side.data.sampler import ReadAhead, ResumableSampler
from trainer_side.data.seeded import SeededSamples
from trainer_side.state.rng import RngState

SEED = 5


def _ranks(length: int, ranks: int, seed: int = SEED, **more: Any) -> list[ResumableSampler]:
    return [ResumableSampler(length, seed=seed, rank=rank, ranks=ranks, **more) for rank in range(ranks)]


def _steps(samplers: list[ResumableSampler], batch_size: int, steps: int) -> list[list[int]]:
    """Return the samples of all ranks for each step."""
    return _taken([sampler.batches(batch_size) for sampler in samplers], steps)


def _taken(iterators: Iterable[Iterator[list[int]]], steps: int) -> list[list[int]]:
    iterators = list(iterators)
    return [list(itertools.chain.from_iterable(map(next, iterators))) for _ in range(steps)]


def _flat(steps: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(steps))


def _order(length: int, samples: int, **more: Any) -> list[int]:
    """Return consecutive epochs in the order in which a single rank gets them."""
    (sampler,) = _ranks(length, 1, **more)
    return next(sampler.batches(samples)) if samples else []


class _Prefetching:
    """A loader that reads some batches ahead."""

    def __init__(self, batch_sampler: ReadAhead, prefetched: int) -> None:
        self.batch_sampler, self._prefetched = batch_sampler, prefetched

    def __iter__(self) -> Iterator[list[int]]:
        read: Iterator[Any] = iter(self.batch_sampler)
        waiting = list(itertools.islice(read, self._prefetched))
        for batch in read:
            waiting.append(batch)
            yield waiting.pop(0)


@given(length=st.integers(1, 70), seed=st.integers(0, 1 << 40))
def test_each_epoch_has_each_sample_once_in_an_order_of_its_own(length: int, seed: int) -> None:
    order = _order(length, 2 * length, seed=seed)
    epochs = order[:length], order[length:]
    assert [sorted(epoch) for epoch in epochs] == [list(range(length))] * 2
    if length > 20:
        assert epochs[0] != epochs[1]
        assert epochs[0] != list(range(length))


def test_the_order_is_the_same_for_ever() -> None:
    # A checkpoint must resume with later versions and on other machines.
    assert _order(10, 12, seed=1) == [4, 5, 3, 8, 2, 6, 9, 7, 1, 0, *_order(10, 12, seed=1)[10:]]
    assert ResumableSampler(10, seed=1, rank=0, ranks=1).state_dict()["order"] == "feistel-24"


class _Attempt:
    """An attempt: number of ranks, batch size, steps of the last save and of the kill."""

    def __init__(self, data: st.DataObject) -> None:
        self.ranks = data.draw(st.sampled_from([4, 3, 5, 1, 2]))
        self.batch_size = data.draw(st.integers(1, 4))
        self.saved = data.draw(st.integers(0, 12))
        self.killed = self.saved + data.draw(st.integers(0, 3))
        self.prefetched = data.draw(st.integers(0, 5))


@settings(max_examples=60)
@given(length=st.integers(1, 60), attempts=st.integers(1, 5), shuffle=st.booleans(), data=st.data())
def test_killed_anywhere_on_any_ranks_it_takes_each_sample_once(
    length: int, attempts: int, shuffle: bool, data: st.DataObject
) -> None:
    saved: dict[str, Any] | None = None
    counted: list[int] = []
    for attempt in [_Attempt(data) for _ in range(attempts)]:
        samplers = _ranks(length, attempt.ranks, shuffle=shuffle)
        for sampler in samplers:
            if saved is not None:
                sampler.load_state_dict(saved)
        loops = [
            sampler.follow(_Prefetching(sampler.ahead(attempt.batch_size), attempt.prefetched))
            for sampler in samplers
        ]
        steps = _taken(loops, attempt.saved)
        if steps or saved is None:
            saved = samplers[0].state_dict()
        assert all(sampler.state_dict() == saved for sampler in samplers if steps), "the same on every rank"
        _taken(loops, attempt.killed - attempt.saved)  # steps after the save do not count
        counted += itertools.chain.from_iterable(steps)
    assert counted == _order(length, len(counted), shuffle=shuffle)


@settings(max_examples=50)
@given(length=st.integers(1, 60), batch_size=st.integers(1, 4), kills=st.lists(st.integers(0, 9), max_size=4))
def test_ranks_as_many_as_before_take_the_same_batches(
    length: int, batch_size: int, kills: list[int]
) -> None:
    taken: list[list[int]] = []
    samplers = _ranks(length, 3)
    for steps in kills:
        taken += _steps(samplers, batch_size, steps)
        saved = samplers[0].state_dict()
        samplers = _ranks(length, 3)
        for sampler in samplers:
            sampler.load_state_dict(saved)
    assert taken == _steps(_ranks(length, 3), batch_size, sum(kills))


def test_more_ranks_than_the_epoch_has_samples_left() -> None:
    samplers = _ranks(10, 4)
    first = _steps(samplers, 2, 1)
    more = _ranks(10, 7)
    for sampler in more:
        sampler.load_state_dict(samplers[0].state_dict())
    assert _flat(first + _steps(more, 3, 1)) == _order(10, 29)
    assert all(sampler.epoch == 2 for sampler in more)


@given(
    length=st.integers(12, 60), before=st.integers(1, 4), after=st.integers(1, 4), steps=st.integers(0, 20)
)
def test_with_drop_last_each_epoch_begins_with_a_batch(
    length: int, before: int, after: int, steps: int
) -> None:
    old, new = _ranks(length, before, drop_last=True), _ranks(length, after, drop_last=True)
    _steps(old, 3, steps)
    saved = old[0].state_dict()
    for sampler in new:
        sampler.load_state_dict(saved)
    left = (length - saved["cursor"]) // (3 * after)
    rest, following = _steps(new, 3, left), _steps(new, 3, length // (3 * after))
    order = _order(length, length * (saved["epoch"] + 2))[length * saved["epoch"] :]
    assert _flat(rest) == order[saved["cursor"] : saved["cursor"] + left * 3 * after]
    assert _flat(following) == order[length : length + len(following) * 3 * after]


def test_samples_come_in_order_without_shuffling() -> None:
    assert _steps(_ranks(10, 2, shuffle=False), 2, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_a_very_long_data_set_costs_nothing() -> None:
    sampler = ResumableSampler(10**12, seed=0, rank=3, ranks=8)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "cursor": 10**11})
    batch = next(sampler.batches(4))
    assert len(set(batch)) == 4
    assert all(0 <= index < 10**12 for index in batch)
    assert sampler.state_dict()["cursor"] == 10**11 + 32


class _Squares(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index * index


class _Augmented(torch.utils.data.Dataset[list[float]]):
    """A data set that draws from every random generator."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> list[float]:
        return [index, torch.rand(1).item(), float(np.random.rand()), random.random()]


class _Prefetcher:
    """Reads one batch ahead, and makes the loader's iterator at the first one, as timm's does."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.batch_sampler = loader, loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following


def _loader(kind: str, data: Any, batch_sampler: ReadAhead, workers: int = 2) -> Any:
    made: Any = DataLoader
    if kind == "stateful":
        made = pytest.importorskip(
            "torchdata.stateful_dataloader", reason="torchdata is not installed"
        ).StatefulDataLoader
    loader = made(data, batch_sampler=batch_sampler, num_workers=workers)
    return _Prefetcher(loader) if kind == "prefetched" else loader


@pytest.mark.parametrize("kind", ["plain", "prefetched", "stateful"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_read_ahead_by_a_loader_do_not_count(kind: str, workers: int) -> None:
    """The loop's random numbers also continue as in an uninterrupted run."""
    (through,) = _ranks(29, 1)
    torch.manual_seed(1)
    loop = through.follow(_loader(kind, _Squares(), through.ahead(4), workers))
    drawn = [(next(loop).tolist(), torch.rand(1).item()) for _ in range(12)]
    assert [sample for batch, _ in drawn for sample in batch] == [index**2 for index in _order(29, 48)]

    (sampler,) = _ranks(29, 1)
    torch.manual_seed(1)
    again, saved, rng = [], sampler.state_dict(), RngState().state_dict()
    for steps in (5, 7):  # killed two steps after each
        (sampler,) = _ranks(29, 1)
        sampler.load_state_dict(saved)
        RngState().load_state_dict(rng)
        loop = sampler.follow(_loader(kind, _Squares(), sampler.ahead(4), workers))
        again += [(next(loop).tolist(), torch.rand(1).item()) for _ in range(steps)]
        saved, rng = sampler.state_dict(), RngState().state_dict()
        for _ in range(2):
            next(loop)
            torch.rand(1)
    assert again == drawn


def test_a_loader_that_is_begun_again_goes_on_behind_what_the_loop_got() -> None:
    (sampler,) = _ranks(40, 1)
    loader: DataLoader[int] = DataLoader(
        _Squares(), batch_sampler=sampler.ahead(4), num_workers=2, persistent_workers=True
    )
    taken: list[int] = []
    for _ in range(3):  # such as an epoch followed by a validation
        for batch in itertools.islice(sampler.follow(loader), 2):
            taken += batch.tolist()
    assert taken == [index**2 for index in _order(40, 24)]


@pytest.mark.parametrize("before", [0, 1])
def test_seeded_samples_draw_the_same_in_any_process_and_attempt(before: int) -> None:
    def run(sampler: ResumableSampler, workers: int, steps: int) -> list[Any]:
        data = SeededSamples(_Augmented(), seed=3)
        loader = DataLoader(
            data, batch_sampler=sampler.ahead(5, epochs=True), num_workers=workers, collate_fn=list
        )
        return list(itertools.islice(sampler.follow(loader), steps))

    (through,), (sampler,), (resumed,) = _ranks(30, 1), _ranks(30, 1), _ranks(30, 1)
    torch.manual_seed(1)
    want = run(through, 0, 12)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(1).get_state()), (
        "the loop's numbers are its own"
    )
    got = run(sampler, before, 4)
    resumed.load_state_dict(sampler.state_dict())
    assert got + run(resumed, 1 - before, 8) == want
    samples = list(itertools.chain.from_iterable(want))
    assert len({tuple(sample[1:]) for sample in samples}) == len(samples), "another epoch has other numbers"


def test_seeded_samples_want_the_epoch() -> None:
    data = SeededSamples(_Augmented(), seed=3)
    assert len(data) == 30
    with pytest.raises(StateError, match="epochs=True"):
        data[3]  # type: ignore[index]


def _from_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_in_the_state_goes_on_with_other_ranks(workers: int) -> None:
    saved: Any = None
    taken: list[int] = []
    for ranks in (4, 3, 5):
        loaders = [
            _loader("stateful", _Squares(), sampler.ahead(2), workers) for sampler in _ranks(29, ranks)
        ]
        for loader in loaders:
            if saved is not None:
                loader.load_state_dict(saved)
        loops = [iter(loader) for loader in loaders]
        for _ in range(3):
            taken += itertools.chain.from_iterable(next(loop).tolist() for loop in loops)
        saved = _from_a_file(loaders[0].state_dict())
        for loop in loops:
            next(loop)
    assert taken == [index**2 for index in _order(29, len(taken))]
    loader = _loader("stateful", _Squares(), _ranks(28, 1)[0].ahead(2), workers)
    loader.load_state_dict(saved)
    with pytest.raises(StateError, match="length: expected 29, got 28"):
        iter(loader)


def test_a_loader_that_nobody_follows_is_not_saved() -> None:
    (sampler,) = _ranks(24, 1)
    next(iter(DataLoader(_Squares(), batch_sampler=sampler.ahead(4))))
    with pytest.raises(StateError, match="follow"):
        sampler.state_dict()


def test_a_sampler_of_single_samples_is_refused() -> None:
    (sampler,) = _ranks(24, 1)
    loader: DataLoader[int] = DataLoader(_Squares(), sampler=sampler, batch_size=4)
    with pytest.raises(StateError, match=r"batch_sampler=sampler\.ahead"):
        next(iter(loader))


def test_a_loader_that_does_not_fit_is_refused() -> None:
    sampler, other = _ranks(24, 1) + _ranks(24, 1)
    elsewhere: DataLoader[int] = DataLoader(_Squares(), batch_sampler=other.ahead(4))
    for loader in (elsewhere, DataLoader(range(24), batch_size=4)):  # type: ignore[arg-type]
        with pytest.raises(StateError, match="takes its samples from elsewhere"):
            sampler.follow(loader)
    mine: DataLoader[int] = DataLoader(_Squares(), batch_sampler=sampler.ahead(4))
    with pytest.raises(StateError, match="batch_size is 5, but the loader reads batches of 4"):
        sampler.follow(mine, 5)
    with pytest.raises(StateError, match="does not tell its batch size"):
        sampler.follow([[1]])
    unordered: DataLoader[int] = DataLoader(
        _Squares(), batch_sampler=sampler.ahead(4), num_workers=1, in_order=False
    )
    with pytest.raises(StateError, match="in_order"):
        sampler.follow(unordered)


def test_a_wrapped_loader_is_followed_by_its_batch_size() -> None:
    (sampler,) = _ranks(24, 1)
    loader: DataLoader[Any] = DataLoader(_Squares(), batch_sampler=sampler.ahead(4))
    next(sampler.follow((batch for batch in loader), 4))
    assert sampler.state_dict()["cursor"] == 4


def test_a_loop_that_began_before_the_restore_is_refused() -> None:
    (sampler,) = _ranks(24, 1)
    loop = sampler.follow(DataLoader(_Squares(), batch_sampler=sampler.ahead(4)))
    next(loop)
    sampler.load_state_dict({**sampler.state_dict(), "cursor": 12})
    with pytest.raises(StateError, match="after restore"):
        next(loop)


def test_two_loops_on_one_sampler_are_refused() -> None:
    (sampler,) = _ranks(24, 1)
    loop = sampler.follow(DataLoader(_Squares(), batch_sampler=sampler.ahead(4)))
    next(loop)
    next(sampler.batches(4))
    with pytest.raises(StateError, match="only one loop"):
        next(loop)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"length": 11}, "length: expected 11, got 10"),
    ({"seed": 6}, "seed: expected 6, got 5"),
    ({"shuffle": False}, "order: expected 'as it is', got 'feistel-24'"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_other_data_is_refused_or_begun_with_the_next_epoch(
    change: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = ResumableSampler(**{"length": 10, "seed": SEED, "rank": 0, "ranks": 1, **change})
    next(old.batches(7))
    saved = old.state_dict()
    (sampler,) = _ranks(10, 1)
    with pytest.raises(StateError, match=f"{named}.*on_change='next-epoch'"):
        sampler.load_state_dict(saved)
    (sampler,) = _ranks(10, 1, on_change="next-epoch")
    sampler.load_state_dict(saved)
    assert named in caplog.text
    assert sampler.epoch == 1
    assert _flat(itertools.islice(sampler.batches(2), 5)) == _order(10, 20)[10:]


@pytest.mark.parametrize("field", ["epoch", "cursor"])
@pytest.mark.parametrize("value", [-1, 1.5, "0", None])
def test_a_place_that_is_none_is_refused(field: str, value: Any) -> None:
    (sampler,) = _ranks(10, 1)
    with pytest.raises(StateError, match="is no place in 10 samples"):
        sampler.load_state_dict({**sampler.state_dict(), field: value})
    with pytest.raises(StateError, match="cursor 11 is no place"):
        sampler.load_state_dict({**sampler.state_dict(), "cursor": 11})
    assert sampler.state_dict()["cursor"] == 0


@pytest.mark.parametrize("saved", [None, {}, [1], {"epoch": 0, "cursor": 3}])
def test_an_invalid_sampler_state_is_refused(saved: Any) -> None:
    with pytest.raises(StateError, match="expected a dict with epoch, cursor, length, seed, order"):
        _ranks(10, 1)[0].load_state_dict(saved)


def test_impossible_sampler_arguments_are_refused() -> None:
    for length, rank, ranks in ((0, 0, 1), (5, 2, 2), (5, -1, 2)):
        with pytest.raises(StateError, match=r"sampler: (length: |rank: )?expected"):
            ResumableSampler(length, seed=0, rank=rank, ranks=ranks)
    with pytest.raises(StateError, match="on_change"):
        ResumableSampler(5, seed=0, rank=0, ranks=1, on_change="ignore")  # type: ignore[arg-type]
    for size in (6, 7):
        with pytest.raises(StateError, match=f"batch size {size} need"):
            _ranks(10, 2, drop_last=True)[0].ahead(size)
