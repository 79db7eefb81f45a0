"""Every path down the ladder ends, never repeats a rung, and stays between the needed and the allowed size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_side.cluster.ladder import (
    CAPACITY,
    PRICE,
    SPOT_QUOTA,
    VCPU_QUOTA,
    FleetRequest,
    Order,
    first_order,
    next_order,
)

CODES = sorted(CAPACITY | PRICE | SPOT_QUOTA | VCPU_QUOTA)
WISH = FleetRequest(("a",), ("s1", "s2"), 3, 2, ("b",), 1)


def way(wish: FleetRequest, code: str) -> list[Order]:
    found = []
    order: Order | None = first_order(wish)
    while order is not None:
        found.append(order)
        order = next_order(wish, order, [code])
    return found


def test_capacity_types_then_zone_then_fewer_then_on_demand() -> None:
    assert way(WISH, "InsufficientInstanceCapacity") == [
        Order(("a",), "s1", 3),
        Order(("a", "b"), "s1", 3),
        Order(("a", "b"), "s2", 3),
        Order(("a", "b"), "s1", 2),
        Order(("a", "b"), "s2", 2),
        Order(("a", "b"), "s1", 2, 1),
        Order(("a", "b"), "s2", 2, 1),
    ]


def test_a_quota_is_the_same_everywhere() -> None:
    assert way(WISH, "MaxSpotInstanceCountExceeded") == [
        Order(("a",), "s1", 3),
        Order(("a",), "s1", 2),
        Order(("a",), "s1", 2, 1),
    ]
    assert way(WISH, "VcpuLimitExceeded") == [Order(("a",), "s1", 3), Order(("a",), "s1", 2)]


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "InvalidParameterValue", "SomethingNew"])
def test_errors_that_a_person_must_mend_are_not_tried_again(code: str) -> None:
    assert next_order(WISH, first_order(WISH), [code, "InsufficientInstanceCapacity"]) is None


names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True).map(tuple)


@given(names, names, st.integers(1, 6), st.data())
def test_every_way_ends(
    types: tuple[str, ...], subnets: tuple[str, ...], nodes: int, data: st.DataObject
) -> None:
    wish = FleetRequest(
        types, subnets, nodes, data.draw(st.integers(1, nodes)), ("more",), data.draw(st.integers(0, 8))
    )
    order: Order | None = first_order(wish)
    seen: set[Order] = set()
    while order is not None:
        assert order not in seen
        seen.add(order)
        assert wish.nodes_min <= order.nodes <= wish.nodes
        assert 0 <= order.on_demand <= min(wish.on_demand_max, order.nodes)
        assert order.subnet in wish.subnets
        order = next_order(wish, order, data.draw(st.lists(st.sampled_from(CODES), min_size=1, max_size=3)))
