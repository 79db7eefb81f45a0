"""A cluster raised, interrupted at every call, refused, replaced and taken down, on EC2 in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import BusyError, ConfigError, FencedError, PeerLost
from operator_side.cluster.file import ClusterFile
from operator_side.cluster.ladder import FleetRequest
from operator_side.cluster.raising import STAGE, TRAIN, Budget, Cluster
from tests.unit.operator_side.cluster.fake import Died, FakeCloud

FILE = ClusterFile.model_validate(
    {
        "region": "eu-west-1",
        "availability_zone": "zone-a",
        "subnet_id": "subnet-0a",
        "trainer_launch_template": {"id": "lt-0a", "version": "3"},
        "stager_launch_template": {"id": "lt-0b", "version": 1},
        "store_url": "s3://bucket/run",
        "project": "holdfast",
        "run_id": "run-7",
        "tags": {"Team": "sea"},
    }
)
WISH = FleetRequest(("a.large", "b.large"), ("subnet-0a", "subnet-0b"), 3, 2)
FREE = Budget()


class Clock:
    started = 0

    def __init__(self) -> None:
        Clock.started += 1  # nobody starts a process again in the second in which it died
        self.now = 1_000_000.0 + 100 * Clock.started

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def cluster(cloud: FakeCloud, tmp_path: Path, file: ClusterFile = FILE) -> Cluster:
    clock = Clock()
    return Cluster(file, cloud, tmp_path / "state.json", clock=clock, sleep=clock.sleep)


def test_up_makes_all_and_a_second_up_nothing(tmp_path: Path) -> None:
    cloud = FakeCloud()
    raised = cluster(cloud, tmp_path).up(WISH, FREE)
    assert len(raised.trainers) == 3
    assert len(raised.started_ids) == 4
    assert raised.stager.subnet == raised.trainers[0].subnet
    for node in cloud.all.values():
        assert {
            "Project": "holdfast",
            "RunId": "run-7",
            "Team": "sea",
            "Store": "s3://bucket/run",
        }.items() <= node.tags.items()
        assert node.generation == raised.generation
    assert [node.is_spot for node in cloud.live(TRAIN)] == [True] * 3
    assert [node.is_spot for node in cloud.live(STAGE)] == [False]
    again = cluster(cloud, tmp_path).up(WISH, FREE)
    assert again.started_ids == ()
    assert again.generation == raised.generation
    assert not (tmp_path / "state.json").exists()


def calls_of_an_up(tmp_path: Path) -> int:
    cloud = FakeCloud()
    cluster(cloud, tmp_path).up(WISH, FREE)
    return cloud.calls


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("remembers", [True, False], ids=["token", "no-token"])
def test_an_up_that_dies_at_any_call_is_gone_on_with(tmp_path: Path, after: bool, remembers: bool) -> None:
    calls = calls_of_an_up(tmp_path)
    assert calls >= 8
    for number in range(1, calls + 1):
        place = tmp_path / f"{number}"
        cloud = FakeCloud(remembers=remembers, dies_at=number, after=after)
        with pytest.raises(Died):
            cluster(cloud, place).up(WISH, FREE)
        raised = cluster(cloud, place).up(WISH, FREE)
        assert (len(cloud.live(TRAIN)), len(cloud.live(STAGE))) == (3, 1), number
        assert {node.id for node in (*raised.trainers, raised.stager)} == {
            node.id for node in cloud.live()
        }, number
        assert len({node.generation for node in cloud.all.values()}) == 1, number


def test_instances_that_are_not_seen_yet_are_not_made_twice(tmp_path: Path) -> None:
    """EC2 shows new machines a little later; until then the token is what keeps them single."""
    cloud = FakeCloud(dies_at=6, after=True)  # the call that makes the trainers
    with pytest.raises(Died):
        cluster(cloud, tmp_path).up(WISH, FREE)
    assert len(cloud.all) == 3
    hidden, cloud.all = cloud.all, {}
    made = cloud.create_trainers
    shown: list[bool] = []

    def and_show(*arguments: object) -> object:
        answer = made(*arguments)  # type: ignore[arg-type]
        cloud.all.update(hidden)
        shown.append(True)
        return answer

    cloud.create_trainers = and_show  # type: ignore[assignment, method-assign]
    raised = cluster(cloud, tmp_path).up(WISH, FREE)
    assert shown == [True]
    assert len(raised.trainers) == 3
    assert len(cloud.live(TRAIN)) == 3


def test_without_capacity_nothing_is_left_and_all_that_was_asked_for_is_said(tmp_path: Path) -> None:
    cloud = FakeCloud(["InsufficientInstanceCapacity"] * 20)
    with pytest.raises(BusyError, match="nothing was started") as said:
        cluster(cloud, tmp_path).up(WISH, FREE)
    assert [(o.nodes, o.subnet) for o in cloud.orders] == [
        (3, "subnet-0a"),
        (3, "subnet-0b"),
        (2, "subnet-0a"),
        (2, "subnet-0b"),
    ]
    assert str(said.value).count("InsufficientInstanceCapacity") == 4
    assert cloud.all == {}


def test_the_stager_follows_the_trainers_into_another_zone(tmp_path: Path) -> None:
    cloud = FakeCloud(["InsufficientInstanceCapacity"])
    raised = cluster(cloud, tmp_path).up(WISH, FREE)
    assert {node.zone for node in (*raised.trainers, raised.stager)} == {"zone-b"}


def test_lost_trainers_are_replaced_where_the_others_are(tmp_path: Path) -> None:
    cloud = FakeCloud(["InsufficientInstanceCapacity"])  # so that they are in zone b
    made = cluster(cloud, tmp_path)
    made.up(WISH, FREE)
    assert made.replace_lost(WISH, FREE) == ()
    cloud.set_state(cloud.live(TRAIN)[0].id, "terminated", "Server.SpotInstanceTermination")
    cloud.set_state(cloud.live(TRAIN)[0].id, "terminated", "Server.SpotInstanceTermination")
    assert len(made.replace_lost(WISH, FREE)) == 2
    assert {(node.zone, node.role) for node in cloud.live(TRAIN)} == {("zone-b", TRAIN)}
    assert len(cloud.live(TRAIN)) == 3
    assert len(made.status(FREE).preempted) == 2


def test_replacements_are_replaced_too(tmp_path: Path) -> None:
    cloud = FakeCloud()
    made = cluster(cloud, tmp_path)
    made.up(WISH, FREE)
    for _ in range(3):
        cloud.set_state(cloud.live(TRAIN)[0].id, "terminated", "Server.SpotInstanceTermination")
        assert len(made.replace_lost(WISH, FREE)) == 1
        assert len(cloud.live(TRAIN)) == 3


def test_a_smaller_cluster_that_would_do_is_left_as_it_is(tmp_path: Path) -> None:
    cloud = FakeCloud(["InsufficientInstanceCapacity"] * 2)
    assert len(cluster(cloud, tmp_path).up(WISH, FREE).trainers) == 2
    assert cluster(cloud, tmp_path).up(WISH, FREE).started_ids == ()
    assert len(cloud.live(TRAIN)) == 2


def test_a_prefix_in_use_is_refused_before_anything_costs(tmp_path: Path) -> None:
    cloud = FakeCloud()
    cluster(cloud, tmp_path).up(WISH, FREE)
    other = FILE.model_copy(update={"run_id": "run-8"})
    with pytest.raises(FencedError, match=r"s3://bucket/run is in use .* run-7"):
        cluster(cloud, tmp_path / "other", other).up(WISH, FREE)
    assert len(cloud.live()) == 4


@pytest.mark.parametrize(("per_hour", "fits"), [(1.30, True), (1.28, False)])
def test_the_budget_is_looked_at_before(tmp_path: Path, per_hour: float, fits: bool) -> None:
    """Three at 0.40, the cheapest of both types in this zone, and the stager at 0.10."""
    cloud = FakeCloud()
    wish = FleetRequest(WISH.types, ("subnet-0a",), 3, 3)
    budget = Budget(per_hour, 0.1)
    if fits:
        cluster(cloud, tmp_path).up(wish, budget)
        assert cloud.price_max == pytest.approx(1.2)
    else:
        with pytest.raises(ConfigError, match=r"at least 1\.20 USD per hour now"):
            cluster(cloud, tmp_path).up(wish, budget)
        assert cloud.all == {}


def test_a_budget_needs_the_price_of_what_is_on_demand(tmp_path: Path) -> None:
    cloud = FakeCloud(["MaxSpotInstanceCountExceeded"])
    wish = FleetRequest(WISH.types, ("subnet-0a",), 2, 2, on_demand_max=2)
    with pytest.raises(ConfigError, match="--on-demand-price"):
        cluster(cloud, tmp_path).up(wish, Budget(10.0))
    raised = cluster(FakeCloud(["MaxSpotInstanceCountExceeded"]), tmp_path).up(wish, Budget(10.0, 0.0, 2.0))
    assert sorted(node.is_spot for node in raised.trainers) == [False, True]


def test_a_standing_cluster_is_priced_per_hour(tmp_path: Path) -> None:
    cloud = FakeCloud()
    made = cluster(cloud, tmp_path)
    made.up(WISH, FREE)
    assert made.status(Budget(None, 0.25)).per_hour == pytest.approx(3 * 0.5 + 0.25)
    cloud.prices = {("b.large", "zone-a"): 0.4}
    assert made.status(FREE).per_hour is None


def test_down_ends_all_also_what_is_made_meanwhile(tmp_path: Path) -> None:
    cloud = FakeCloud()
    made = cluster(cloud, tmp_path)
    made.up(WISH, FREE)
    for node in cloud.live():
        cloud.set_state(node.id, "stopped")
    assert len(made.down()) == 4
    assert {node.state for node in cloud.all.values()} == {"terminated"}
    assert made.down() == ()


@pytest.mark.parametrize("what", ["instance", "volume"])
def test_down_names_what_is_left(tmp_path: Path, what: str) -> None:
    cloud = FakeCloud()
    made = cluster(cloud, tmp_path)
    made.up(WISH, FREE)
    cloud.stubborn = what == "instance"
    cloud.rest = ("vol-77",) if what == "volume" else ()
    with pytest.raises(PeerLost, match="still something with Project") as said:
        made.down(seconds_max=30)
    assert ("vol-77" if what == "volume" else "i-00000000") in str(said.value)


def test_machines_that_die_while_starting_are_said(tmp_path: Path) -> None:
    cloud = FakeCloud()
    made = cloud.create_trainers

    def dead(*arguments: object) -> object:
        answer = made(*arguments)  # type: ignore[arg-type]
        cloud.set_state(answer.ids[0], "terminated", "Server.InternalError")
        return answer

    cloud.create_trainers = dead  # type: ignore[assignment, method-assign]
    with pytest.raises(PeerLost, match=r"i-00000000 \(Server.InternalError\) ended while starting"):
        cluster(cloud, tmp_path).up(WISH, FREE)
    cloud.create_trainers = made  # type: ignore[method-assign]
    raised = cluster(cloud, tmp_path).up(FleetRequest(WISH.types, WISH.subnets, 3, 3), FREE)
    assert len(raised.trainers) == len(cloud.live(TRAIN)) == 3
