"""Starts, shows and ends a cluster. Each step finds the machines of the run by their tags.

    up      in use? ─► templates exist? ─► price ─► trainers (all or none) ─► stager, in their zone ─► running
    status  nodes by role, their price, the preempted ones
    down    terminate by tag ─► wait ─► look for leftovers with the tags

`up` may be killed at any point and run again. Before the first call that costs money it records its generation, from
which it derives every ClientToken, so repeating a call returns the same machines. EC2 forgets tokens after a while, but
not tags; so before each call `up` also looks by tag for machines that an earlier call started.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import BusyError, ConfigError, FencedError, PeerLost
from operator_side.cluster.ec2 import Ec2, Node
from operator_side.cluster.file import ClusterFile
from operator_side.cluster.ladder import FleetRequest, Order, first_order, next_order

_log = logging.getLogger("holdfast.cluster")

TRAIN, STAGE = "train", "stager"
_POLL_SECONDS = 5.0
_CENT = 0.01
_TOKEN_CHARACTERS = 48  # EC2 accepts 64


@dataclass(frozen=True, slots=True)
class Budget:
    """Largest price of the cluster, in US dollars per hour, and the prices that EC2 does not report."""

    per_hour: float | None = None  # of all machines, including the stager; None: no limit
    stager_per_hour: float = 0.0
    on_demand_per_hour: float | None = None  # of one trainer; None: unknown


@dataclass(frozen=True, slots=True)
class RaisedCluster:
    """The cluster after `up`. `started_ids`: ids of the machines that this call started; the others existed before."""

    generation: str
    trainers: tuple[Node, ...]
    stager: Node
    started_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster now. `preempted`: taken by EC2. `per_hour`: US dollars at current spot prices; None: unknown."""

    trainers: tuple[Node, ...]
    stagers: tuple[Node, ...]
    preempted: tuple[Node, ...]
    per_hour: float | None


class Cluster:
    """The machines of one run. `state`: file that records the generation of an unfinished `up`."""

    def __init__(
        self,
        file: ClusterFile,
        cloud: Ec2,
        state: Path,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._file, self._cloud, self._state = file, cloud, state
        self._clock, self._sleep = clock, sleep

    # -- up --------------------------------------------------------------------------------------------------------

    def up(self, request: FleetRequest, budget: Budget, *, seconds_max: float = 600.0) -> RaisedCluster:
        """Start the missing machines. Raises `ConfigError`: the user must fix credentials, templates, budget or quota;
        `BusyError`: EC2 has no capacity; no trainer of this call is left running; `FencedError`: another cluster uses
        the store; `PeerLost`: EC2 does not answer, or machines do not start.
        """
        self._reject_foreign()
        self._cloud.check_templates()
        generation = self._generation()
        started_ids: list[str] = []
        trainers = self._live(TRAIN)
        if len(trainers) < request.nodes_min or not trainers:
            started_ids += self._start_trainers(request, budget, generation, trainers)
            trainers = self._wait_until_running(TRAIN, started_ids, seconds_max)
        if not self._live(STAGE):
            answer = self._cloud.create_stager(
                trainers[0].subnet or request.subnets[0],
                self._tags(STAGE, generation),
                self._token(generation, STAGE, self._count_nodes(STAGE, generation)),
            )
            if not answer.ids:
                raise BusyError(
                    f"the stager was not started: {', '.join(answer.codes)}: {answer.message}; the {len(trainers)} "
                    "trainers run and cost money: run the same command again, or `holdfast cluster down`"
                )
            started_ids += answer.ids
        wanted = [*started_ids, *(node.id for node in trainers)]
        new = [i for i in started_ids if i not in {n.id for n in trainers}]
        self._wait_until_running(STAGE, new, seconds_max)
        trainers = tuple(node for node in self._live(TRAIN) if node.id in wanted)
        self._state.unlink(missing_ok=True)
        return RaisedCluster(generation, trainers, self._live(STAGE)[0], tuple(started_ids))

    def replace_lost(self, request: FleetRequest, budget: Budget) -> tuple[str, ...]:
        """Start the missing trainers in the zone of the running ones. Return the ids of the new trainers."""
        live = self._live(TRAIN)
        if len(live) >= request.nodes:
            return ()
        generation = live[0].generation if live else self._generation()
        return tuple(self._start_trainers(request, budget, generation, live))

    def _start_trainers(
        self, request: FleetRequest, budget: Budget, generation: str, live: Sequence[Node]
    ) -> list[str]:
        subnets = tuple(dict.fromkeys(n.subnet for n in live if n.subnet)) or request.subnets
        least = max(1, request.nodes_min - len(live))
        missing = replace(request, subnets=subnets, nodes=request.nodes - len(live), nodes_min=least)
        order: Order | None = first_order(missing)
        refused = []
        while order is not None:
            price_max = self._price_max(order, budget, live)
            serial = self._count_nodes(TRAIN, generation)
            token = self._token(generation, TRAIN, serial, order)
            answer = self._cloud.create_trainers(order, self._tags(TRAIN, generation), token, price_max)
            if len(answer.ids) >= order.nodes:
                return list(answer.ids)
            if answer.ids:  # EC2 broke all-or-nothing: terminate the machines that it started
                self._cloud.terminate(answer.ids)
            codes = ", ".join(answer.codes)
            refused.append(
                f"{order.nodes} nodes ({order.on_demand} on demand) of {'|'.join(order.types)}, {order.subnet}: {codes}"
            )
            _log.warning("EC2 refused %s: %s", refused[-1], answer.message)
            order = next_order(missing, order, answer.codes)
        raise BusyError(
            "there is no capacity for this cluster, and nothing was started:\n  "
            + "\n  ".join(refused)
            + "\ngive --more-types, another --subnet, a lower --nodes-min or a higher --on-demand-max; or wait"
        )

    def _reject_foreign(self) -> None:
        own = self._file.identifying_tags.items()
        users = [node for node in self._cloud.nodes({"Store": self._file.store_url}) if node.is_live]
        others = [node for node in users if not own <= node.tags.items()]
        if others:
            names = ", ".join(
                f"{n.id} of run {n.tags.get('RunId')} ({n.tags.get('Project')})" for n in others[:5]
            )
            raise FencedError(
                f"{self._file.store_url} is in use by another cluster: {names}; end that cluster, or use another prefix"
            )

    def _price_max(self, order: Order, budget: Budget, live: Sequence[Node]) -> float | None:
        """Return the price limit of an order's spot nodes; None: no limit. Raises `ConfigError`: too high; unknown."""
        if budget.per_hour is None:
            return None
        left = budget.per_hour - budget.stager_per_hour - self._spot_cost(live)
        if order.on_demand:
            if budget.on_demand_per_hour is None:
                raise ConfigError(
                    "--budget-per-hour and --on-demand-max need --on-demand-price, since EC2 does not report this price"
                )
            left -= order.on_demand * budget.on_demand_per_hour
        spot = order.nodes - order.on_demand
        if spot:
            zone = self._file.availability_zone if order.subnet == self._file.subnet_id else None
            known = self._cloud.spot_prices(order.types)
            prices = [price for (_, where), price in known.items() if zone in {None, where}]
            if not prices:
                raise ConfigError(
                    f"EC2 has no spot price for {', '.join(order.types)} in {zone or self._file.region}; check --types"
                )
            if spot * min(prices) > left + _CENT:
                raise ConfigError(
                    f"{spot} spot nodes cost at least {spot * min(prices):.2f} USD per hour now, and {left:.2f} of the "
                    f"budget of {budget.per_hour:.2f} is left; give fewer --nodes, other --types, or a higher budget"
                )
        elif left < 0:
            raise ConfigError(
                f"the on-demand nodes alone cost {-left:.2f} USD per hour more than the budget; "
                "raise --budget-per-hour, or lower --on-demand-max"
            )
        return max(left, 0.0)

    def _wait_until_running(self, role: str, ids: Sequence[str], seconds_max: float) -> tuple[Node, ...]:
        """Wait until these machines are running. EC2 lists a new machine only after a while."""
        deadline = self._clock() + seconds_max
        while True:
            nodes = {node.id: node for node in self._nodes() if node.role == role}
            ended = [i for i in ids if i in nodes and not nodes[i].is_live]
            if ended:
                raise PeerLost(
                    f"{', '.join(f'{i} ({nodes[i].reason or nodes[i].state})' for i in ended)} ended while starting; "
                    "run the same command again"
                )
            if all(i in nodes and nodes[i].state == "running" for i in ids):
                return tuple(node for node in nodes.values() if node.is_live)
            if self._clock() > deadline:
                raise PeerLost(
                    f"{', '.join(ids)}: not running after {seconds_max:g} s; run the same command again, or "
                    "`holdfast cluster down`"
                )
            self._sleep(_POLL_SECONDS)

    # -- status ----------------------------------------------------------------------------------------------------

    def status(self, budget: Budget) -> ClusterStatus:
        nodes = self._nodes()
        live = [node for node in nodes if node.is_live]
        trainers = tuple(n for n in live if n.role == TRAIN)
        stagers = tuple(n for n in live if n.role == STAGE)
        preempted = tuple(n for n in nodes if n.reason.startswith("Server.Spot"))
        per_hour: float | None = None
        on_demand = [n for n in trainers if not n.is_spot]
        if not on_demand or budget.on_demand_per_hour is not None:
            try:
                per_hour = self._spot_cost(trainers) + len(stagers) * budget.stager_per_hour
                per_hour += len(on_demand) * (budget.on_demand_per_hour or 0.0)
            except ConfigError as error:
                _log.warning("%s", error)
        return ClusterStatus(trainers, stagers, preempted, per_hour)

    def _spot_cost(self, nodes: Sequence[Node]) -> float:
        spot = [(node.type, node.zone) for node in nodes if node.is_spot]
        if not spot:
            return 0.0
        prices = self._cloud.spot_prices(sorted({kind for kind, _ in spot}))
        unknown = set(spot) - prices.keys()
        if unknown:
            raise ConfigError(
                f"EC2 has no spot price for {sorted(unknown)}, so the price of the cluster is not known"
            )
        return sum(prices[place] for place in spot)

    # -- down ------------------------------------------------------------------------------------------------------

    def down(self, *, seconds_max: float = 600.0) -> tuple[str, ...]:
        """Terminate every machine with the run's tags; return the ids. Raises `PeerLost`, which names what is left."""
        deadline = self._clock() + seconds_max
        ended: dict[str, None] = {}
        while True:
            left = [node.id for node in self._nodes() if node.state != "terminated"]
            fresh = [i for i in left if i not in ended]
            if fresh:  # an `up` that runs elsewhere may have started new ones
                self._cloud.terminate(fresh)
                ended.update(dict.fromkeys(fresh))
            rest = (*left, *self._cloud.leftovers(self._file.identifying_tags)) if not left else tuple(left)
            if not rest:
                self._state.unlink(missing_ok=True)
                return tuple(ended)
            if self._clock() > deadline:
                raise PeerLost(
                    f"after {seconds_max:g} s there is still something with Project={self._file.project}, "
                    f"RunId={self._file.run_id}: {', '.join(rest)}; run the same command again, or look at it in the "
                    "EC2 console"
                )
            self._sleep(_POLL_SECONDS)

    # -- tags ------------------------------------------------------------------------------------------------------

    def running(self) -> tuple[Node, ...]:
        """Return the running trainers, the oldest first."""
        return tuple(node for node in self._live(TRAIN) if node.state == "running" and node.address)

    def _nodes(self) -> tuple[Node, ...]:
        return self._cloud.nodes(self._file.identifying_tags)

    def _live(self, role: str) -> tuple[Node, ...]:
        nodes = [node for node in self._nodes() if node.is_live and node.role == role]
        return tuple(sorted(nodes, key=lambda node: (node.launched, node.id)))

    def _count_nodes(self, role: str, generation: str) -> int:
        """Count all machines of this generation: the token changes after a loss, but not if `up` resumes."""
        return sum(node.role == role and node.generation == generation for node in self._nodes())

    def _generation(self) -> str:
        """Return the generation of live machines or of an interrupted `up`, else a new one, recorded before its use."""
        live = [node.generation for node in self._nodes() if node.is_live and node.generation]
        if live:
            return max(live)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(self._state.read_text())
            if isinstance(saved["generation"], str):
                return str(saved["generation"])
        generation = f"{int(self._clock()):010d}"
        self._state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._state.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump({"generation": generation}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._state)
        return generation

    def _tags(self, role: str, generation: str) -> dict[str, str]:
        return {
            **self._file.tags,
            **self._file.identifying_tags,
            "Role": role,
            "Generation": generation,
            "Store": self._file.store_url,
            "ManagedBy": "holdfast",
            "Name": f"{self._file.project}-{self._file.run_id}-{role}",
        }

    def _token(self, generation: str, role: str, serial: int, order: Order | None = None) -> str:
        run = (self._file.project, self._file.run_id, self._file.store_url)
        text = json.dumps([*run, generation, role, serial, repr(order)])
        return hashlib.sha256(text.encode()).hexdigest()[:_TOKEN_CHARACTERS]
