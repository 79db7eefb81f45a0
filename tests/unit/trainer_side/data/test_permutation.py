"""A permutation: one sample per position, one position per sample, random-looking and stable."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_side.data.permutation import Permutation


@given(length=st.integers(1, 500), name=st.text())
def test_the_order_is_a_permutation(length: int, name: str) -> None:
    assert sorted(Permutation(length, name).at(0, length)) == list(range(length))


@given(length=st.integers(1, 300), data=st.data())
def test_a_part_is_what_the_whole_has_there(length: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(0, length - first))
    order = Permutation(length, "x")
    assert order.at(first, count) == order.at(0, length)[first : first + count]


def test_the_order_is_the_same_for_ever() -> None:
    # A checkpoint of today must go on tomorrow, on another machine.
    assert Permutation(10, "1/0").at(0, 10) == [4, 5, 3, 8, 2, 6, 9, 7, 1, 0]
    assert Permutation(10**12, "1/0").at(10**11, 3) == [918058443097, 614130965810, 595262841295]


@pytest.mark.parametrize("length", [10**12, (1 << 62) + 1])
def test_very_many_places(length: int) -> None:
    found = Permutation(length, "x").at(length - 1000, 1000)
    assert len(set(found)) == 1000
    assert all(0 <= index < length for index in found)
    assert max(found) > length // 2 > min(found)


@pytest.mark.parametrize("length", [2, 3, 6])
def test_all_orders_are_equally_likely(length: int) -> None:
    orders, each = math.factorial(length), 5
    found = Counter(tuple(Permutation(length, str(name)).at(0, length)) for name in range(each * orders))
    chi_squared = sum((count - each) ** 2 / each for count in found.values()) + (orders - len(found)) * each
    assert chi_squared < (orders - 1) + 5 * math.sqrt(2 * (orders - 1))


def test_neighbours_part() -> None:
    """A long order: two places that follow each other have samples that are as far apart as by chance."""
    length = 100_000
    order = Permutation(length, "x").at(0, length)
    rising = sum(first < second for first, second in itertools.pairwise(order))
    assert abs(rising - length / 2) < 5 * math.sqrt(length / 12)
    distance = sum(abs(first - second) for first, second in itertools.pairwise(order)) / length
    assert abs(distance / (length / 3) - 1) < 0.02
    fixed = sum(index == place for place, index in enumerate(order))
    assert fixed < 10
