"""The next request when EC2 refuses one. Pure.

    no capacity:   other instance types ─► the next subnet (zone) ─► one node fewer ─► one on demand ─► give up
    spot quota:                                                      one node fewer ─► one node on demand ─► give up
    vCPU quota:                                                      one node fewer, none on demand ─► give up
    price:         other instance types ─► the next subnet ──────────────────────────────────────────────► give up
    others:        the user must fix it

The number of nodes falls one by one, since each is a small part of the training. On-demand nodes come last, since they
cost several times as much. Every path down the ladder ends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

CAPACITY = frozenset(
    {
        *("InsufficientInstanceCapacity", "InsufficientCapacity", "InsufficientHostCapacity"),
        *("InsufficientCapacityOnHost", "InsufficientFreeAddressesInSubnet"),
        *("UnfulfillableCapacity", "Unsupported"),
    }
)
SPOT_QUOTA = frozenset(
    {"MaxSpotInstanceCountExceeded", "SpotInstanceCountExceeded", "MaxSpotFleetRequestCountExceeded"}
)
VCPU_QUOTA = frozenset({"VcpuLimitExceeded", "InstanceLimitExceeded"})
PRICE = frozenset({"SpotMaxPriceTooLow", "MaxTotalPriceExceeded"})


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """The wanted cluster, and the acceptable alternatives. `subnets`: the best first; each is in one zone."""

    types: tuple[str, ...]
    subnets: tuple[str, ...]
    nodes: int
    nodes_min: int
    more_types: tuple[str, ...] = ()
    on_demand_max: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """One request, all or nothing: `nodes` of one type in one subnet; `on_demand` of them are not spot."""

    types: tuple[str, ...]
    subnet: str
    nodes: int
    on_demand: int = 0


def first_order(request: FleetRequest) -> Order:
    return Order(request.types, request.subnets[0], request.nodes)


def next_order(request: FleetRequest, order: Order, codes: Collection[str]) -> Order | None:
    """Return the request after these error codes; None: give up. The strictest code wins: quotas apply everywhere."""
    known = set(codes)
    if known - CAPACITY - SPOT_QUOTA - VCPU_QUOTA - PRICE:
        return None
    if known & VCPU_QUOTA:
        return _fewer(request, replace(order, on_demand=0)) if not order.on_demand else None
    if known & SPOT_QUOTA:
        return _fewer(request, order) or _on_demand(request, order)
    if known & PRICE:
        return _other_place(request, order)
    return _other_place(request, order) or _fewer(request, order) or _on_demand(request, order)


def _other_place(request: FleetRequest, order: Order) -> Order | None:
    if request.more_types and order.types == request.types:
        return replace(order, types=request.types + request.more_types)
    where = request.subnets.index(order.subnet) + 1
    return replace(order, subnet=request.subnets[where]) if where < len(request.subnets) else None


def _fewer(request: FleetRequest, order: Order) -> Order | None:
    if order.nodes <= request.nodes_min:
        return None
    return replace(order, nodes=order.nodes - 1, subnet=request.subnets[0])


def _on_demand(request: FleetRequest, order: Order) -> Order | None:
    if order.on_demand >= min(request.on_demand_max, order.nodes):
        return None
    return replace(order, on_demand=order.on_demand + 1, subnet=request.subnets[0])
