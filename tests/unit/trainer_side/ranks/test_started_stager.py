"""The stager that ranks join if the job may start its own: at the start, and after a loss. No process."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError, PeerLost
from holdfast.image.shares import ShareNumber
from holdfast.net.handshake import JobStart
from holdfast.own_stager import OwnStagerEndpoint
from tests.support.restoring import Ranks, ThreadPeers
from trainer_side.ranks import started_stager
from trainer_side.ranks.c10d_store import StoreAnnouncements
from trainer_side.ranks.peers import LonePeers
from trainer_side.ranks.started_stager import (
    OwnShare,
    StagerStarter,
    StartedStager,
    living_share,
    starting_ranks,
)
from trainer_side.ranks.tcp_stager_port import StagerTarget, TcpStagerPort

RANK_0 = OwnShare()
NAMED, OWN = "node-9:29411", OwnStagerEndpoint("127.0.0.1:7", "k" * 32)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("HOLDFAST_LISTEN", raising=False)
    monkeypatch.chdir(tmp_path)


class Net:
    """Simulated stagers by address, with a record of requests; and the stager that rank 0 starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: set[str] = set()
        self.asked: list[tuple[int, str, bytes | None, int]] = []
        self.living: OwnStagerEndpoint | None = None
        self.starts = 0
        self.deaf: set[int] = set()  # ranks that reach none
        self.now = 0.0
        self.announced = b""
        self.lead_attempts: set[int] = set()
        monkeypatch.setattr(started_stager, "connect_to_stager", self._connected)
        monkeypatch.setattr(started_stager, "find_own_stager", lambda *_: self.living)
        monkeypatch.setattr(StagerStarter, "start", lambda _: self._start())

    def _start(self) -> OwnStagerEndpoint:
        self.starts += 1
        self.living = OWN
        self.answer.add(OWN.address)
        return OWN

    def _connected(
        self,
        _: TrainerConfig,
        target: StagerTarget,
        *,
        rank: int,
        ranks: int,
        start: JobStart,
        seconds_max: float,
    ) -> TcpStagerPort:
        assert ranks >= 1
        address, key = target.address, target.key
        self.lead_attempts.add(target.lead_attempt)
        self.asked.append((rank, address, key, start.generation))
        if address not in self.answer or rank in self.deaf:
            self.now += seconds_max
            raise PeerLost(f"the stager at {address} could not be reached within {seconds_max:g} s: refused")
        return cast(TcpStagerPort, f"port to {address}")

    def die(self, address: str) -> None:
        self.answer.discard(address)
        if address == OWN.address:
            self.living = None

    def die_quietly(self) -> None:
        self.living = None

    def announce(self, data: bytes) -> None:
        self.announced = data

    def latest(self) -> bytes:
        return self.announced

    def own(
        self, peers: LonePeers | ThreadPeers | None = None, share: OwnShare = RANK_0, **settings: object
    ) -> StartedStager:
        config = TrainerConfig.from_sources(**{"store": "/mnt/run", "stager": "own", **settings})
        start = JobStart("launch", b"i" * 16)
        made, announcements = peers or LonePeers(), cast(StoreAnnouncements, self)
        return StartedStager(
            config,
            made,
            start,
            one_machine=True,
            announcements=announcements,
            own=share,
            clock=lambda: self.now,
        )


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    return Net(monkeypatch)


def test_rank_0_starts_one_and_all_ranks_get_its_address_and_key(net: Net) -> None:
    Ranks(3).run(net.own)
    assert net.starts == 1
    assert sorted(net.asked) == [(rank, OWN.address, OWN.key.encode(), 0) for rank in range(3)]


def test_a_stager_that_an_earlier_start_has_left_is_taken_and_one_that_ends_is_not(net: Net) -> None:
    left = OwnStagerEndpoint("127.0.0.1:9", "l" * 32)
    net.living, net.answer = left, {left.address}
    net.own()
    assert (net.starts, net.asked[-1][1:3]) == (0, (left.address, left.key.encode()))
    net.die(left.address)
    net.living = left  # it is ending, and its note is there still
    net.own()
    assert (net.starts, net.asked[-1][1]) == (1, OWN.address)


def test_the_stager_of_another_share_is_started_by_the_first_rank_of_its_node(net: Net) -> None:
    share = OwnShare(2, ShareNumber(1, 2), lead_attempt=7)
    doors = Ranks(3).run(lambda peers: net.own(peers, share, stager="own-per-node"))
    assert net.starts == 1
    assert {asked[:2] for asked in net.asked} == {(rank, OWN.address) for rank in range(3)}
    assert net.lead_attempts == {7}
    net.die(OWN.address)
    with pytest.raises(PeerLost):
        doors[0].reconnect(1, 8)
    doors[2].reconnect(1, 8)
    doors[0].reconnect(1, 8)
    assert (net.starts, net.lead_attempts) == (2, {7, 8})


@pytest.mark.parametrize(
    ("living", "roots"),
    [
        (["", "", ""], [0, 2, 4]),
        (["2/3", "1/3", "3/3"], [2, 0, 4]),
        (["", "1/3", ""], [2, 0, 4]),
        (["3/3", "", "3/3"], [0, 2, 4]),  # of two starts: one of them is waited for
        (["2/2", "1/1", "no share"], [0, 2, 4]),
    ],
)
def test_a_node_whose_stager_lives_keeps_its_share(living: list[str], roots: list[int]) -> None:
    assert starting_ranks([0, 2, 4], living) == roots


def test_the_share_of_a_living_stager_is_empty_without_one(net: Net) -> None:
    config = TrainerConfig.from_sources(store="/mnt/run", stager="own-per-node")
    assert living_share(config) == ""
    net.living = OwnStagerEndpoint("127.0.0.1:9", "l" * 32, "2/2")
    assert living_share(config) == "2/2"
    assert living_share(TrainerConfig.from_sources(stager="own-per-node")) == ""


def test_a_stager_with_another_share_is_waited_for_until_it_has_ended(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    net.living = OwnStagerEndpoint("127.0.0.1:9", "l" * 32, "1/3")
    net.answer = {"127.0.0.1:9"}
    monkeypatch.setattr("trainer_side.ranks.started_stager.time.sleep", lambda _: net.die_quietly())
    net.own(share=OwnShare(0, ShareNumber(0, 2)), stager="own-per-node")
    assert (net.starts, [asked[1] for asked in net.asked]) == (1, [OWN.address])


def test_a_stager_with_another_share_that_does_not_end_is_an_error_that_says_why(net: Net) -> None:
    net.living = OwnStagerEndpoint("127.0.0.1:9", "l" * 32, "1/2")
    share = OwnShare(0, ShareNumber(1, 2), lead_attempt=1)
    with pytest.raises(PeerLost, match="each node a directory of its own in HOLDFAST_RUNTIME_DIR"):
        net.own(share=share, stager="own-per-node", start_seconds_max=0.01)
    assert net.starts == 0


def test_a_rank_that_does_not_reach_it_ends_all_ranks_and_says_which_setting_helps(net: Net) -> None:
    net.deaf = {1}
    _, errors = Ranks(3).outcomes(net.own)
    assert [type(error) for error in errors] == [PeerLost] * 3
    assert all("set HOLDFAST_LISTEN to HOST:PORT of rank 0's machine" in str(error) for error in errors)


def test_a_stager_that_cannot_be_started_ends_all_ranks(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: StagerStarter) -> OwnStagerEndpoint:
        raise ConfigError("no such address")

    monkeypatch.setattr(StagerStarter, "start", fail)
    _, errors = Ranks(2).outcomes(net.own)
    assert [(type(error), "no such address" in str(error)) for error in errors] == [(ConfigError, True)] * 2


def test_a_stager_that_dies_is_started_again_by_rank_0_alone(net: Net) -> None:
    door = net.own()
    net.die(OWN.address)
    door.reconnect(1)
    assert net.starts == 2
    assert net.asked[-1] == (0, OWN.address, OWN.key.encode(), 1)
    door.reconnect(2)
    assert net.starts == 2, "it lives"


@pytest.mark.parametrize(
    ("settings", "environ", "words"),
    [
        ({"store": None}, {}, "stager: own, and no store is set for the stager to write to"),
        ({"store": None, "stager": "own-per-node"}, {}, "stager: own-per-node, and no store is set"),
        ({}, {"HOLDFAST_LISTEN": "127.0.0.1:7"}, "is reached from rank 0's machine alone"),
        ({}, {"HOLDFAST_RING_BYTES": "lots"}, "ring_bytes"),
        ({"tls_ca": "ca.pem"}, {}, "the stager that rank 0 starts has no tls_cert"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_started(
    net: Net,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    environ: dict[str, str],
    words: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = TrainerConfig.from_sources(**{"stager": "own", "store": "/mnt/run", **settings})
    with pytest.raises(HoldfastError, match=words):
        StagerStarter(config, one_machine=False)
    assert net.starts == 0


# -- in the place of one that is lost ----------------------------------------------------------------------------


def test_the_named_stager_is_used_as_long_as_it_answers(net: Net) -> None:
    net.answer = {NAMED}
    door = net.own(stager=NAMED, on_stager_lost="own", key="n" * 32)
    assert net.asked == [(0, NAMED, b"n" * 32, 0)]
    net.die(NAMED)
    with pytest.raises(PeerLost):
        door.reconnect(1)
    net.answer.add(NAMED)
    door.reconnect(2)
    assert (net.starts, net.announced) == (0, b"")
    net.die(NAMED)
    net.now += 1000
    with pytest.raises(PeerLost):  # its time begins again
        door.reconnect(3)


def test_a_named_stager_that_stays_lost_is_replaced_and_the_other_ranks_follow(net: Net) -> None:
    net.answer = {NAMED}
    doors = Ranks(2).run(lambda peers: net.own(peers, stager=NAMED, on_stager_lost="own"))
    net.die(NAMED)
    for door in doors:
        with pytest.raises(PeerLost):
            door.reconnect(1)
    assert net.starts == 0
    net.now += 30
    doors[0].reconnect(2)
    assert (net.starts, OwnStagerEndpoint.from_bytes(net.announced)) == (1, OWN)
    doors[1].reconnect(2)
    assert net.asked[-1] == (1, OWN.address, OWN.key.encode(), 2)


def test_an_own_one_that_the_claim_refuses_gives_way_to_the_named_one_that_comes_back(net: Net) -> None:
    net.answer = {NAMED}
    doors = Ranks(2).run(lambda peers: net.own(peers, stager=NAMED, on_stager_lost="own"))
    net.die(NAMED)
    with pytest.raises(PeerLost):
        doors[0].reconnect(1)
    net.now += 30
    doors[0].reconnect(2)
    net.die(OWN.address)  # FencedError: the flusher of the lost one lives
    net.answer.add(NAMED)
    doors[0].reconnect(3)
    doors[1].reconnect(3)
    assert [asked[1] for asked in net.asked[-2:]] == [NAMED] * 2
    net.die(NAMED)
    with pytest.raises(PeerLost):
        doors[0].reconnect(4)


def test_a_start_without_the_named_one_begins_with_one_of_its_own(net: Net) -> None:
    Ranks(2).run(lambda peers: net.own(peers, stager=NAMED, on_stager_lost="own"))
    assert net.starts == 1
    assert {asked[1] for asked in net.asked if asked[0] == 1} == {OWN.address}
