"""`save()` with local tiers and a simulated link: a step that one of them declines may still go to the other."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config import TrainerConfig
from holdfast.crc import crc32 as true_crc32
from holdfast.errors import PeerLost
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire.frames import Kind
from holdfast.wire.welcome import Welcome
from tests.unit.trainer_side.stager_port import FakePort
from tests.unit.trainer_side.test_checkpointer import FakeLink
from tests.unit.trainer_side.tiers.ranks import Net, until
from trainer_side.checkpointer import Checkpointer
from trainer_side.link import link as real
from trainer_side.link.greeting import GreetedStager
from trainer_side.link.inbox import ShareInbox
from trainer_side.link.stager_group import StagerGroup
from trainer_side.tiers.local_tiers import LocalTiers, TierJob, TierReport
from trainer_side.tiers.open_tiers import open_tiers
from trainer_side.tiers.tier_inventory import TierInventory
from trainer_side.transfer import Transfer


class Link(FakeLink):
    """A link that sends nothing until the test allows it."""

    def offer(self, step: int, source: Any, record: SaveRecord, layout: Any) -> Transfer:
        if self.job.problem is not None:
            return Transfer.not_sent(step, record, Reason.from_error(self.job.problem))
        return super().offer(step, source, record, layout)


class Stagers:
    """Two stagers, each with a share, and messages that the test plays."""

    def __init__(self) -> None:
        self.ports = [FakePort(), FakePort()]

    def meet(self, config: TrainerConfig, _world: Any, inbox: ShareInbox, events: EventLog) -> StagerGroup:
        welcome = Welcome("/run", 1, 4096, 64, 1, 60.0, 5.0)
        links = [
            real.Link(config, GreetedStager(port, welcome, name), own, events, rank=0)
            for port, name, own in zip(
                self.ports, ("stager 1/2", "stager 2/2"), (inbox, ShareInbox(0, lambda: -1)), strict=True
            )
        ]
        return StagerGroup(links, events)


class Rank:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        specs: list[str],
        stagers: Stagers | None = None,
        **settings: Any,
    ) -> None:
        self.link = Link()
        usual = {"tiers": specs, "tier_slots": 3, "tier_writers": 1, "on_not_durable": "warn"}
        self.config = TrainerConfig(**{**usual, **settings})

        def opened(*args: Any) -> LocalTiers:
            ledger, events = args[-2:]
            tiers = open_tiers(self.config, "/run")
            nothing = ((),) * len(tiers)
            self.local = LocalTiers(
                tiers,
                Net(1).port(0),
                self.config,
                job=TierJob(1, "job"),
                inventory=TierInventory(0, nothing, nothing),
                report=TierReport(0, ledger, events),
            )
            return self.local

        monkeypatch.setattr("trainer_side.builder.join", (stagers or self.link).meet)
        monkeypatch.setattr("trainer_side.builder.open_tier_set", opened)
        self.model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(1000)) for _ in range(20))
        self.checkpointer = Checkpointer({"model": self.model, "note": 1}, config=self.config)

    def save(self, step: int) -> bool:
        self.checkpointer._copier.gate.wait()
        with torch.no_grad():
            for parameter in self.model:
                parameter.fill_(step + 1)
        return self.checkpointer.save(step)

    def holds(self, step: int, number: int = 0) -> bool:
        """Whether the tier has this step, with bytes of this step only."""
        tier = self.local.tiers[number]
        kept = [one for one in tier.kept_slices() if one.seal.step == step]
        if not kept:
            return False
        slice_bytes = memoryview(bytearray(kept[0].layout.image_bytes))
        tier.read_into(kept[0], 0, slice_bytes)
        wanted = torch.full((1000,), float(step + 1)).numpy().tobytes()
        return bytes(slice_bytes).count(wanted) == len(self.model)


@pytest.fixture
def specs(tmp_path: Path) -> list[str]:
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    return [f"memory:{tmp_path / 'memory'}", f"file:{tmp_path / 'disk'}"]


def test_a_step_that_the_stager_declines_goes_to_the_tiers(
    monkeypatch: pytest.MonkeyPatch, specs: list[str]
) -> None:
    rank = Rank(monkeypatch, specs)
    monkeypatch.setattr(
        rank.link, "decline_reason", lambda step: Reason("busy", "rank 1: busy") if step == 3 else None
    )
    assert rank.save(3)
    until(lambda: rank.local.is_idle)
    assert rank.holds(3)
    assert rank.holds(3, 1)
    assert not rank.link.offers
    assert rank.checkpointer.stats.saved == 1
    rank.checkpointer.close()


def test_checkpoints_go_on_when_the_stager_is_lost(monkeypatch: pytest.MonkeyPatch, specs: list[str]) -> None:
    rank = Rank(monkeypatch, specs)
    assert rank.save(1)
    rank.link.stage(1)
    until(lambda: rank.local.is_idle)
    rank.link.job.problem = PeerLost("the stager: of the test")
    for step in (3, 5, 7):
        assert rank.save(step)
        until(lambda: rank.local.is_idle)
    assert rank.checkpointer.kept_step == 7
    assert rank.holds(7)
    assert rank.checkpointer.stats.declined == 0
    rank.model.append(torch.nn.Parameter(torch.zeros(1000)))  # a new layout needs no stager either
    assert rank.save(9)
    until(lambda: rank.local.is_idle)
    assert rank.holds(9)
    rank.checkpointer.close()


@pytest.mark.parametrize("declining", [0, 1])
def test_a_step_that_one_of_two_stagers_declines_is_kept_in_the_tiers(
    monkeypatch: pytest.MonkeyPatch, specs: list[str], declining: int
) -> None:
    stagers = Stagers()
    other = stagers.ports[1 - declining]
    rank = Rank(monkeypatch, specs, stagers, close_seconds_max=0.1)
    assert rank.save(3)
    until(lambda: all(port.of(Kind.OFFER) for port in stagers.ports))
    stagers.ports[declining].say(Kind.DECLINED, step=3, body={"reason": "rank 1: busy", "cause": "busy"})
    until(lambda: other.of(Kind.DECLINE))
    until(lambda: is_idle_once_woken(rank))
    assert rank.holds(3)
    assert rank.holds(3, 1)
    assert rank.checkpointer.kept_step == 3
    assert rank.checkpointer.stats.saved == 1
    rank.checkpointer.close()


def test_while_one_of_two_stagers_is_lost_checkpoints_go_to_the_tiers_and_the_other_one_hears_why(
    monkeypatch: pytest.MonkeyPatch, specs: list[str]
) -> None:
    stagers = Stagers()
    rank = Rank(monkeypatch, specs, stagers)
    assert rank.save(1)
    until(lambda: all(port.of(Kind.OFFER) for port in stagers.ports))
    stagers.ports[1].dead = True  # it has received nothing
    until(lambda: stagers.ports[0].of(Kind.DECLINE))
    for step in (3, 5):
        assert rank.save(step)
        until(lambda: is_idle_once_woken(rank))
    assert rank.holds(5)
    assert rank.checkpointer.kept_step == 5
    assert rank.checkpointer.stats.declined == 0
    until(lambda: [frame.step for frame in stagers.ports[0].of(Kind.DECLINE)] == [1, 3, 5])
    assert [frame.step for frame in stagers.ports[0].of(Kind.OFFER)] == [1]
    rank.checkpointer.close()


def test_without_a_slot_the_stager_still_gets_it_unless_the_slot_is_the_area(
    monkeypatch: pytest.MonkeyPatch, specs: list[str]
) -> None:
    for first, taken in ((1, True), (0, False)):
        rank = Rank(monkeypatch, specs[first:][:1], in_flight_max=4)
        assert rank.save(0)
        rank.link.stage(0)
        until(lambda: rank.local.is_idle)  # noqa: B023 (called at once)
        monkeypatch.setattr(rank.local.tiers[0], "begin", lambda *_: None)
        assert rank.save(1) is taken
        assert (1 in rank.link.offers) is taken
        skipped = rank.checkpointer.stats.skipped
        assert skipped == {f"{specs[first]}: busy": 1}
        if taken:
            rank.link.stage(1)
        rank.checkpointer.close()  # until then the step may be the last one, which is waited for
        if not taken:
            assert rank.link.declined[1].text == "busy: no slot of the first local tier is free"


def test_with_memory_first_no_other_staging_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, specs: list[str]
) -> None:
    rank = Rank(monkeypatch, specs, in_flight_max=2)
    assert rank.save(0)
    assert rank.save(1)
    assert rank.checkpointer._parts.areas.nbytes == 0
    assert rank.link.bytes_of(0).count(torch.full((1000,), 1.0).numpy().tobytes()) == len(rank.model)
    for step in (0, 1):
        rank.link.stage(step)
    until(lambda: rank.local.is_idle)
    assert rank.holds(1)
    rank.checkpointer.close()


def test_a_copy_that_fails_is_kept_nowhere(monkeypatch: pytest.MonkeyPatch, specs: list[str]) -> None:
    rank = Rank(monkeypatch, specs)
    assert rank.save(0)
    rank.link.stage(0)
    until(lambda: rank.local.is_idle)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("of the test")

    monkeypatch.setattr(rank.checkpointer._parts.engine, "copy", fail)
    assert rank.save(1)
    until(lambda: rank.local.is_idle)
    assert not rank.holds(1)
    assert rank.local.complete_step == 0
    assert rank.checkpointer.stats.skipped == {f"{spec}: copy failed": 1 for spec in specs}
    rank.checkpointer.close()


def test_lanes_hear_of_each_frame_and_do_not_wait_for_their_next_look(
    monkeypatch: pytest.MonkeyPatch, specs: list[str]
) -> None:
    for name in ("_LOOK_SECONDS", "_UNTOLD_SECONDS"):
        monkeypatch.setattr(f"trainer_side.tiers.tier_writer_threads.{name}", 3600.0)
    rank = Rank(monkeypatch, specs, tier_writers=2)
    for step in (1, 2, 3):
        assert rank.save(step)
        rank.link.stage(step)
        until(lambda: {"memory", "file"} <= kept_kinds(rank, step))  # noqa: B023 (called at once)
        until(lambda: is_idle_once_woken(rank))
    rank.checkpointer.close()


def is_idle_once_woken(rank: Rank) -> bool:
    """A verdict waits for the link, which lets go of a slot at some time and tells no lane of it."""
    for lane in rank.local._threads:
        lane._wake()
    return rank.local.is_idle


def kept_kinds(rank: Rank, step: int) -> set[str]:
    tiers = rank.local.tiers
    return {str(tier.nearness) for tier in tiers if step in {one.seal.step for one in tier.kept_slices()}}


def test_crcs_of_one_slice_are_computed_by_several_threads_at_once(
    monkeypatch: pytest.MonkeyPatch, specs: list[str]
) -> None:
    together, turns = threading.Barrier(3, timeout=60), itertools.count()

    def crc32(view: memoryview) -> int:
        if next(turns) < together.parties:
            together.wait()
        return true_crc32(view)

    monkeypatch.setattr("trainer_side.tiers.tier_write.crc32", crc32)
    rank = Rank(monkeypatch, specs[:1], tier_writers=3)
    assert rank.save(1)
    rank.link.stage(1)
    until(lambda: rank.local.is_idle)
    assert rank.checkpointer.kept_step == 1
    rank.checkpointer.close()
