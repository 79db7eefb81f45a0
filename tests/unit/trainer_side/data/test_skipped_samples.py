"""Skipped batches: exactly those of the named steps, across epochs, on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from holdfast.errors import StateError
from trainer_side.data.sampler import ResumableSampler
from trainer_side.data.skipped_samples import SkippedSamples
from trainer_side.data.stream import ResumableStream

LENGTH, BATCH = 23, 2


class Loop:
    """The training loop of all ranks, as the Checkpointer sees it. `micro`: batches of a step."""

    def __init__(self, ranks: int, *, micro: int = 1, streams: bool = False, **more: Any) -> None:
        self.sources: list[Any] = [
            ResumableStream(_Numbers(), rank=rank, ranks=ranks)
            if streams
            else ResumableSampler(LENGTH, seed=3, rank=rank, ranks=ranks, **more)
            for rank in range(ranks)
        ]
        self._micro, self._step = micro, 0
        self._batches: list[Iterator[list[int]]] = []

    def resume(self, saved: dict[str, Any], step: int) -> None:
        for source in self.sources:
            source.load_state_dict(saved)
            source.stepped(step)
        self._step = step + 1

    def skip(self, after: int, steps: int) -> None:
        for source in self.sources:
            source.skip_batches(after, steps)

    def train(self, steps: int, batch_size: int = BATCH) -> list[list[int]]:
        """The samples of all ranks, by step."""
        self._batches = self._batches or [source.batches(batch_size) for source in self.sources]
        found = []
        for _ in range(steps):
            found.append(
                [one for _ in range(self._micro) for batches in self._batches for one in next(batches)]
            )
            for source in self.sources:
                source.stepped(self._step)
            self._step += 1
        return found

    def state(self) -> dict[str, Any]:
        states: list[dict[str, Any]] = [source.state_dict() for source in self.sources]
        assert all(state == states[0] for state in states), "the same on every rank"
        return states[0]


class _Numbers:
    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        while self._next < LENGTH:
            self._next += 1
            yield self._next - 1
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, saved: dict[str, Any], /) -> None:
        self._next = saved["next"]


def _flat(steps: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(steps))


kinds = st.sampled_from([{}, {"drop_last": True}, {"streams": True}])


@settings(max_examples=60)
@given(
    kind=kinds,
    ranks=st.integers(1, 3),
    micro=st.integers(1, 3),
    before=st.integers(1, 8),
    after=st.integers(0, 9),
    left_out=st.integers(1, 14),
    saves=st.lists(st.integers(0, 6), max_size=3),
)
def test_the_batches_of_the_named_steps_and_no_others_are_left_out(
    kind: dict[str, Any],
    ranks: int,
    micro: int,
    before: int,
    after: int,
    left_out: int,
    saves: list[int],
) -> None:
    """Restarts on the new branch, before the gap, in front of it and behind it, neither repeat nor forget it."""
    steps = after + sum(saves) + 4
    first = Loop(ranks, micro=micro, **kind)
    first.train(before)
    saved = first.state()
    used = first.train(steps + left_out)
    expected = used[:after] + used[after + left_out :]
    branch = Loop(ranks, micro=micro, **kind)
    branch.resume(saved, before - 1)
    branch.skip(after, left_out)
    taken: list[list[int]] = []
    for more in saves:
        taken += branch.train(more)
        state = branch.state()
        branch = Loop(ranks, micro=micro, **kind)
        branch.resume(state, before - 1 + len(taken))
    taken += branch.train(steps - len(taken))
    assert taken == expected
    assert "skipped" not in branch.state()


@settings(max_examples=40)
@given(
    streams=st.booleans(),
    before=st.integers(1, 8),
    after=st.integers(0, 9),
    left_out=st.integers(1, 9),
    ranks=st.integers(1, 5),
    batch_size=st.integers(1, 4),
)
def test_other_ranks_leave_out_the_same_samples(
    streams: bool, before: int, after: int, left_out: int, ranks: int, batch_size: int
) -> None:
    first = Loop(2, streams=streams)
    first.train(before)
    saved = first.state()
    used = first.train(after + left_out + 30)
    expected = _flat(used[:after] + used[after + left_out :])
    branch = Loop(ranks, streams=streams)
    branch.resume(saved, before - 1)
    branch.skip(after, left_out)
    taken = _flat(branch.train(5, batch_size))
    assert taken == expected[: len(taken)]
    state, later = branch.state(), Loop(2, streams=streams)
    later.resume(state, before + 4)
    rest = _flat(later.train(3))
    assert taken + rest == expected[: len(taken) + len(rest)]


def test_a_second_rewind_counts_the_steps_of_its_own_branch() -> None:
    first = Loop(1)
    first.train(2)
    saved = first.state()
    used = first.train(12)
    branch = Loop(1)
    branch.resume(saved, 1)
    branch.skip(3, 2)  # steps 5 and 6
    branch.train(1)
    again = Loop(1)
    again.resume(branch.state(), 2)
    again.skip(1, 3)  # 4, 5 and 6, which the new branch takes from where 4, 7 and 8 were
    assert again.train(3) == [used[1], used[7], used[8]]


def test_a_loader_that_reads_ahead_leaves_them_out() -> None:
    first = Loop(1)
    first.train(2)
    saved = first.state()
    used = first.train(9)
    sampler = ResumableSampler(LENGTH, seed=3, rank=0, ranks=1)
    loader: DataLoader[Any] = DataLoader(
        range(LENGTH),  # type: ignore[arg-type]
        batch_sampler=sampler.ahead(BATCH),
    )
    sampler.load_state_dict(saved)
    sampler.stepped(1)
    begun = iter(sampler.ahead(BATCH))
    sampler.skip_batches(2, 3)
    batches = sampler.follow(loader)
    assert [next(batches).tolist() for _ in range(4)] == used[:2] + used[5:7]
    with pytest.raises(StateError, match="begin to iterate after restore"):
        next(begun)


@pytest.mark.parametrize("kind", [{}, {"streams": True}])
def test_a_checkpoint_that_does_not_say_what_a_step_takes_is_refused(kind: dict[str, Any]) -> None:
    first = Loop(1, **kind)
    first.train(2)
    older = {name: value for name, value in first.state().items() if name != "step"}
    branch = Loop(1, **kind)
    branch.resume(older, 1)
    with pytest.raises(StateError, match="does not say how many samples a step takes"):
        branch.skip(0, 1)


def test_spans_that_touch_become_one() -> None:
    assert SkippedSamples([(5, 7), (1, 3), (3, 4), (6, 9)]).spans == ((1, 4), (5, 9))
    assert SkippedSamples([(2, 2)]).spans == ()
