"""Who is spared, and what all ranks make of it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.entries import REPLICATED, SPLIT, Entry
from holdfast.image.layout import Layout
from holdfast.image.regions import Region, unite
from holdfast.image.slices import area_bytes
from holdfast.notices.sparing import NO_LIMIT, NOBODY, Ability, Spares, Sparing, warning_of

CHUNK = 4096
_LAYOUT = Layout(
    12 * CHUNK, CHUNK, 3, (Entry("a", 64, 10 * CHUNK, REPLICATED, ()), Entry("r", 11 * CHUNK, 90, 2, ()))
)


def _spares(*limits: int | None) -> Spares:
    spares = Spares(len(limits))
    for rank, limit in enumerate(limits):
        spares.can(rank, Ability(1.0 + rank, limit))
    return spares


def test_those_that_go_are_spared_and_all_of_them_are_not() -> None:
    spares = _spares(NO_LIMIT, 7000, 9000)
    assert spares.wanted == NOBODY
    assert spares.go({2})
    assert spares.wanted == Sparing((2,), 7000)
    assert not spares.go({2})
    assert spares.go({0})
    assert spares.wanted == Sparing((0, 2), 7000)
    assert spares.go({1, 2})
    assert spares.wanted == NOBODY


def test_a_rank_that_cannot_have_another_slice_or_has_not_said_is_reason_enough_for_nobody() -> None:
    tiered = _spares(NO_LIMIT, None, NO_LIMIT)
    tiered.go({0})
    assert tiered.wanted == NOBODY
    silent = Spares(3)
    silent.go({0})
    silent.can(0, Ability(0.0, NO_LIMIT))
    assert silent.wanted == NOBODY


def test_a_plan_takes_as_long_as_that_of_the_slowest_rank_and_longer_for_a_larger_slice() -> None:
    spares = _spares(NO_LIMIT, NO_LIMIT, NO_LIMIT)
    assert spares.plan_seconds(Sparing((1,))) == pytest.approx(3.0 * 3 / 2)
    assert spares.plan_seconds(Sparing((0, 1))) == pytest.approx(3.0 * 3)
    assert spares.plan_seconds(NOBODY) == pytest.approx(3.0)


def test_a_layout_with_too_large_an_area_for_somebody_spares_nobody() -> None:
    spared = _LAYOUT.sparing((2,))
    largest = max(area_bytes(spared, rank) for rank in range(3))
    assert Sparing((2,), largest).of(_LAYOUT) == spared
    assert Sparing((2,), largest - 1).of(_LAYOUT) == _LAYOUT
    assert Sparing((2,)).of(_LAYOUT) == spared
    assert Sparing((1,)).of(spared) == _LAYOUT.sparing((1,)), "not in addition"
    assert NOBODY.of(spared) == _LAYOUT
    assert Sparing((3,)).of(_LAYOUT) == _LAYOUT, "there is no such rank"


def _split(*held: Region | None) -> Layout:
    pattern = unite((6, 1000), 1, held)
    entries = (Entry("a", 64, pattern.nbytes, SPLIT, ()), Entry("b", 8000, pattern.nbytes, SPLIT, ()))
    return Layout(5 * CHUNK, CHUNK, len(held), entries, patterns=(pattern,))


def _rows(first: int, count: int) -> Region:
    return Region((first, 0), (count, 1000))


def test_what_a_replica_holds_too_is_sent_by_the_replica() -> None:
    """HSDP: two replicas of two shards. Rank 2 is spared: rank 0 sends all that both hold."""
    layout = Sparing((2,)).of(_split(_rows(0, 3), _rows(3, 3), _rows(0, 3), _rows(3, 3)))
    assert layout.spared == (2,)
    assert layout.slice_bytes(2) == 0
    assert warning_of(layout, 2, "rank 2") == ""


def test_a_shard_that_nobody_else_has_is_told_in_bytes() -> None:
    """FSDP: each rank has its own rows. And HSDP, where both replicas of a shard go."""
    layout = Sparing((2,)).of(_split(_rows(0, 2), _rows(2, 2), _rows(4, 2)))
    assert layout.slice_bytes(2) == 4000
    assert warning_of(layout, 2, "rank 2 on host b").startswith(
        "rank 2 on host b holds 4000 bytes of split tensors that no rank which stays has: "
    )
    both = Sparing((0, 2)).of(_split(_rows(0, 3), _rows(3, 3), _rows(0, 3), _rows(3, 3)))
    told = [warning_of(both, rank, f"rank {rank}") for rank in both.spared]
    assert sum(both.slice_bytes(rank) for rank in both.spared) == 6000
    assert [word for one in told for word in one.split() if word.isdigit()] == ["0", "3000", "2", "3000"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"spared": None},
        {"spared": [1, 0]},
        {"spared": [0, 0]},
        {"spared": [-1]},
        {"spared": [True]},
        {"spared": "0"},
        {"area_bytes_max": None},
        {"area_bytes_max": -1},
        {"area_bytes_max": 1.5},
    ],
)
def test_what_is_no_sparing_is_refused(wrong: dict[str, Any]) -> None:
    sparing = Sparing((0, 2), 4096)
    assert Sparing.from_json(sparing.to_json()) == sparing
    with pytest.raises(ProtocolError, match="SAVE_AT"):
        Sparing.from_json({**sparing.to_json(), **wrong})


@pytest.mark.parametrize(
    "wrong",
    [{"plan_seconds": -1}, {"plan_seconds": float("nan")}, {"plan_seconds": "1"}, {"area_bytes_max": "1"}],
)
def test_what_is_no_ability_is_refused(wrong: dict[str, Any]) -> None:
    for ability in (Ability(), Ability(1.5, 4096)):
        assert Ability.from_json(ability.to_json()) == ability
    assert Ability.from_json({}) == Ability()
    with pytest.raises(ProtocolError, match="AT"):
        Ability.from_json(wrong)
