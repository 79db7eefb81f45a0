"""Who is spared, and what all ranks make of it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.layout import REPLICATED, Entry, Layout
from holdfast.image.slices import area_bytes
from holdfast.notices.sparing import NO_LIMIT, NOBODY, Ability, Spares, Sparing

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
