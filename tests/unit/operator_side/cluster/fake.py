"""EC2 in memory: remembers tokens as EC2 does, or not, as moto does; refuses as told; dies before or after a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from operator_side.cluster.ec2 import Ec2, FleetAnswer, Node
from operator_side.cluster.ladder import Order


class Died(BaseException):
    """The process was killed here."""


class FakeCloud(Ec2):
    """Args:
    refusals: Codes with which the next requests for trainers are refused.
    remembers: Whether tokens make a repeated call harmless.
    dies_at: Number of the call at which the process dies, counted from 1; `after`: once it has had its effect.
    """

    def __init__(
        self, refusals: Sequence[str] = (), *, remembers: bool = True, dies_at: int = 0, after: bool = False
    ) -> None:
        self.refusals, self.remembers, self.dies_at, self.after = list(refusals), remembers, dies_at, after
        self.calls = self.made = 0
        self.all: dict[str, Node] = {}
        self.orders: list[Order] = []
        self.prices = {("a.large", "zone-a"): 0.5, ("b.large", "zone-a"): 0.4, ("a.large", "zone-b"): 0.1}
        self.price_max: float | None = None
        self.rest: tuple[str, ...] = ()
        self.stubborn = False
        self._by_token: dict[str, FleetAnswer] = {}

    def live(self, role: str = "") -> list[Node]:
        return [node for node in self.all.values() if node.is_live and role in {"", node.role}]

    def nodes(self, tags: Mapping[str, str]) -> tuple[Node, ...]:
        with _Call(self):
            return tuple(n for n in self.all.values() if all(n.tags.get(k) == v for k, v in tags.items()))

    def check_templates(self) -> None:
        with _Call(self):
            pass

    def create_trainers(
        self, order: Order, tags: Mapping[str, str], token: str, price_max: float | None
    ) -> FleetAnswer:
        with _Call(self):
            self.price_max = price_max
            if self.remembers and token in self._by_token:
                return self._by_token[token]
            self.orders.append(order)
            if self.refusals:
                code = self.refusals.pop(0)
                return FleetAnswer((), (code,), "as told")
            ids = tuple(
                self._make(tags, order.types[0], order.subnet, i >= order.on_demand)
                for i in range(order.nodes)
            )
            self._by_token[token] = FleetAnswer(ids)
            return FleetAnswer(ids)

    def create_stager(self, subnet: str, tags: Mapping[str, str], token: str) -> FleetAnswer:
        with _Call(self):
            if not self.remembers or token not in self._by_token:
                self._by_token[token] = FleetAnswer((self._make(tags, "stager.large", subnet, False),))
            return self._by_token[token]

    def terminate(self, ids: Sequence[str]) -> None:
        with _Call(self):
            for i in ids:
                self.set_state(i, "shutting-down" if self.stubborn else "terminated")

    def leftovers(self, tags: Mapping[str, str]) -> tuple[str, ...]:
        with _Call(self):
            return self.rest

    def spot_prices(self, types: Sequence[str]) -> dict[tuple[str, str], float]:
        return {place: price for place, price in self.prices.items() if place[0] in types}

    def set_state(self, i: str, state: str, reason: str = "") -> None:
        n = self.all[i]
        self.all[i] = Node(
            n.id,
            n.role,
            state,
            n.type,
            n.address,
            n.zone,
            n.subnet,
            n.is_spot,
            n.launched,
            n.generation,
            n.tags,
            reason,
        )

    def _make(self, tags: Mapping[str, str], kind: str, subnet: str, is_spot: bool) -> str:
        number = self.made
        self.made += 1
        i = f"i-{number:08x}"
        zone = {"subnet-0a": "zone-a", "subnet-0b": "zone-b"}[subnet]
        launched = datetime(2026, 1, 1, 0, 0, number % 60, tzinfo=UTC)
        self.all[i] = Node(
            i,
            tags["Role"],
            "running",
            kind,
            f"10.0.0.{number + 1}",
            zone,
            subnet,
            is_spot,
            launched,
            tags["Generation"],
            dict(tags),
        )
        return i


class _Call:
    def __init__(self, cloud: FakeCloud) -> None:
        self._cloud = cloud

    def __enter__(self) -> None:
        self._cloud.calls += 1
        if self._cloud.calls == self._cloud.dies_at and not self._cloud.after:
            raise Died

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._cloud.calls == self._cloud.dies_at and self._cloud.after:
            raise Died
