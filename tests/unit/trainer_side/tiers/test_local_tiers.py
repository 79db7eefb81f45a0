"""A rank's tiers with real slot files: which steps are kept, skipped and lost, and when an area is released."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import TrainerConfig
from holdfast.crc import crc32
from holdfast.errors import ConfigError, StoreError
from holdfast.image.proof_record import Digest
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import FRAME_ALIGNMENT_BYTES
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.telemetry.causes import DeclineCause
from holdfast.telemetry.events import EventLog
from tests.support.events import read_events
from tests.unit.trainer_side.tiers.ranks import Area, Net, laid_out, until
from trainer_side.ledger import Ledger
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.tiers.local_tiers import LocalTiers, TierJob, TierReport
from trainer_side.tiers.medium import CachedFile, PmFile
from trainer_side.tiers.open_tiers import open_tiers
from trainer_side.tiers.slot_files import SlotFiles
from trainer_side.tiers.tier import Tier
from trainer_side.tiers.tier_inventory import TierInventory
from trainer_side.tiers.tier_write import TierWrite

RUN = "/run"
NOTHING = ((), ())


class Rank:
    """One rank with tiers, alone unless it gets a net."""

    def __init__(
        self,
        specs: list[str],
        *,
        rank: int = 0,
        ranks: int = 1,
        net: Net | None = None,
        attempt: int = 1,
        inventory: TierInventory | None = None,
        prepared: bool = True,
        agreed_steps: AgreedSteps | None = None,
        events: Path | None = None,
        **settings: Any,
    ) -> None:
        config = TrainerConfig(
            **{"tiers": specs, "tier_slots": 2, "tier_writers": 2, "tier_seconds_max": 60.0, **settings}
        )
        self.tiers: list[Tier] = open_tiers(config, RUN)
        self.ledger, self.layout, self.rank = Ledger(), laid_out(ranks), rank
        self.local = LocalTiers(
            self.tiers,
            (net or Net(ranks)).port(rank),
            config,
            job=TierJob(attempt, "job"),
            inventory=inventory or TierInventory(0, NOTHING, NOTHING),
            report=TierReport(rank, self.ledger, EventLog(events, role="trainer", rank=rank)),
            agreed_steps=agreed_steps,
        )
        self.lanes = self.local._threads
        if prepared:
            self.local.prepare(self.layout)

    def begin(self, step: int, *, wait_seconds: float = 0.0) -> TierWrite | None:
        record = SaveRecord(saved_at_unix=1.0)
        return self.local.begin(step, record, wait_until=time.monotonic() + wait_seconds)

    def save(
        self, step: int, *, link: threading.Event | None = None, frames: int | None = None
    ) -> tuple[TierWrite, Area]:
        tier_write = self.begin(step, wait_seconds=60)
        assert tier_write is not None
        memory = tier_write.writers[0].memory if tier_write.source_tier == 0 else None
        area = Area(self.layout, self.rank, memory)
        tier_write.link_released = link or _set()
        self.local.keep(tier_write, area)
        area.fill(step, frames=frames)
        return tier_write, area

    def kept(self, number: int = 0) -> list[int]:
        return [one.seal.step for one in self.tiers[number].kept_slices() if one.seal.rank == self.rank]

    def proofs(self, step: int) -> list[Digest]:
        """The proofs of this step in the tiers."""
        found = [
            tier.proof(one) for tier in self.tiers for one in tier.kept_slices() if one.seal.step == step
        ]
        return [digest for digest in found if digest is not None]

    def bytes_of(self, step: int, number: int = 0) -> set[int]:
        """All values that the kept slice has, after its CRCs were compared."""
        (one,) = [
            one
            for one in self.tiers[number].kept_slices()
            if (one.seal.step, one.seal.rank) == (step, self.rank)
        ]
        values: set[int] = set()
        area = Area(self.layout, self.rank)
        for frame, sealed in zip(area.frames, one.seal.frame_crc32s, strict=True):
            view = area.view(frame.offset, frame.nbytes)
            self.tiers[number].read_into(one, frame.offset, view)
            assert crc32(view) == sealed
            values |= set(view)
        return values


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def specs(tmp_path: Path) -> list[str]:
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    return [f"memory:{tmp_path / 'memory'}", f"file:{tmp_path / 'disk'}"]


@pytest.fixture
def rank(specs: list[str]) -> Iterator[Rank]:
    found = Rank(specs)
    yield found
    found.local.close(60)


def test_a_step_is_kept_in_every_tier_and_the_area_released(rank: Rank) -> None:
    for step in (3, 5, 7):
        tier_write, _ = rank.save(step)
        assert tier_write.released.wait(60)
        until(lambda: rank.local.is_idle)
        assert rank.local.complete_step == step
    for number in (0, 1):
        assert rank.kept(number)[0] == 7
        assert rank.bytes_of(7, number) == {7}
    names = [tier.name for tier in rank.tiers]
    assert rank.ledger.stats.kept == {names[0]: 3, names[1]: 3}
    assert rank.tiers[0].kept_slices()[0].seal.record["job"] == "job"


def test_the_slot_is_the_area_and_is_summed_once(rank: Rank) -> None:
    tier_write, area = rank.save(3)
    assert tier_write.source_tier == 0
    assert tier_write.released.wait(60)
    frames = len(area.frames)
    assert area.views == 3 * frames, "a view for each tier's write, and one for the CRC of both"
    assert all(frame.offset % FRAME_ALIGNMENT_BYTES == 0 for frame in area.frames)


def test_frames_are_written_before_the_last_is_there(rank: Rank) -> None:
    tier_write, area = rank.save(3, frames=2)
    until(lambda: len(tier_write._crcs) == 2)
    time.sleep(0.05)
    assert not tier_write.released.is_set()
    assert not rank.kept()
    area.fill(3)
    assert tier_write.released.wait(60)


def test_a_cancelled_step_is_kept_nowhere_and_frees_its_slots(rank: Rank) -> None:
    tier_write, _ = rank.save(3, frames=2)
    tier_write.cancel(DeclineCause.COPY_STUCK.because("of the test"))
    assert tier_write.released.wait(60)
    assert not tier_write.is_wanted
    assert tier_write.lost_in.keys() == {0, 1}
    assert not rank.kept(0)
    assert not rank.kept(1)
    assert rank.ledger.stats.skipped == {f"{tier.name}: copy stuck": 1 for tier in rank.tiers}
    again = [rank.save(step)[0] for step in (4, 5)]
    assert all(one.released.wait(60) for one in again), "both slots could be used"


def test_a_step_that_is_not_new_gets_no_slot(rank: Rank) -> None:
    assert rank.save(3)[0].released.wait(60)
    assert rank.begin(3) is None
    assert rank.begin(2) is None


def test_a_slot_is_waited_for_where_one_will_become_free(rank: Rank) -> None:
    """As `save()` does with `on_full="wait"`; and not for ever where the step before does not end."""
    assert rank.save(1)[0].released.wait(60)
    until(lambda: rank.local.is_idle)
    tier_write, area = rank.save(3, frames=2)
    late = rank.local.begin(4, SaveRecord(), wait_until=time.monotonic() + 0.05)
    assert late is None, "one slot holds what is complete, the other what is on its way"
    found: list[TierWrite | None] = []
    waiting = threading.Thread(
        target=lambda: found.append(rank.local.begin(5, SaveRecord(), wait_until=time.monotonic() + 60))
    )
    waiting.start()
    area.fill(3)
    waiting.join(60)
    assert tier_write.released.is_set()
    assert found[0] is not None
    assert found[0].writers.keys() == {0, 1}
    rank.local.drop(found[0], DeclineCause.BUSY.because("of the test"))


def test_a_slot_that_the_link_still_reads_is_not_used_again(rank: Rank) -> None:
    """Strategy D: COMPLETE and the end of newer steps are there, and the slot of step 3 is still being sent."""
    sending = threading.Event()
    tier_write, area = rank.save(3, link=sending)
    assert tier_write.released.wait(60)
    assert rank.save(5)[0].released.wait(60)
    until(lambda: rank.local.complete_step == 5 and rank.local._is_idle_in(rank.local._threads[1]))
    time.sleep(0.05)
    third = rank.begin(7)
    assert third is not None
    assert 0 not in third.writers, "its only free slot is the one that is being sent"
    assert set(area.memory[: area.frames[0].nbytes]) == {3}
    rank.local.drop(third, DeclineCause.BUSY.because("of the test"))
    sending.set()
    until(lambda: rank.local.is_idle)
    fourth = rank.begin(8)
    assert fourth is not None
    assert 0 in fourth.writers
    rank.local.drop(fourth, DeclineCause.BUSY.because("of the test"))


def test_a_slot_that_another_tier_still_reads_is_not_used_again(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategy D with a slow disk: steps 3 and 5 are complete in memory, and the disk has not read step 3."""
    go_on, write = threading.Event(), CachedFile.write

    def slow(self: CachedFile, offset: int, view: memoryview) -> None:
        assert go_on.wait(60)
        write(self, offset, view)

    monkeypatch.setattr(CachedFile, "write", slow)
    first, area = rank.save(3)
    rank.save(5)
    until(lambda: rank.local.complete_step == 5)
    third = rank.begin(7)
    assert third is None or 0 not in third.writers
    assert set(area.memory[: area.frames[0].nbytes]) == {3}
    if third is not None:
        rank.local.drop(third, DeclineCause.BUSY.because("of the test"))
    go_on.set()
    assert first.released.wait(60)
    until(lambda: rank.local.is_idle)
    assert rank.bytes_of(5, 1) == {5}
    fourth = rank.begin(9)
    assert fourth is not None
    assert 0 in fourth.writers
    rank.local.drop(fourth, DeclineCause.BUSY.because("of the test"))


def test_a_void_step_that_the_link_still_reads_keeps_its_slot(specs: list[str]) -> None:
    net = Net(2)
    ranks = [Rank(specs, rank=number, ranks=2, net=net) for number in range(2)]
    sending = threading.Event()
    _, area = ranks[0].save(3, link=sending)
    ranks[1].local.skip(3, DeclineCause.BUSY.because("of the test"))
    until(lambda: ranks[0].lanes[0]._verdicts)
    ranks[0].save(5, link=sending)
    third = ranks[0].begin(7)
    assert third is None or 0 not in third.writers, "its only free slot is the one that is being sent"
    if third is not None:
        ranks[0].local.drop(third, DeclineCause.BUSY.because("of the test"))
    assert set(area.memory[: area.frames[0].nbytes]) == {3}
    sending.set()
    _close(ranks)


def test_a_slice_that_is_sealed_after_the_verdict_gives_its_slot_back(
    specs: list[str], tmp_path: Path
) -> None:
    """One rank withdraws each step before the other has begun it, more often than there are slots."""
    net, log = Net(2), tmp_path / "events"
    ranks = [Rank(specs, rank=number, ranks=2, net=net, events=log) for number in range(2)]

    def has_heard(rank: int, step: int) -> bool:
        lines = read_events(log)
        found = [one for one in lines if (one["event"], one["rank"], one.get("step")) == ("void", rank, step)]
        return len(found) >= len(specs)

    for step in range(1, 9):
        early, late = (step // 5), 1 - step // 5
        ranks[early].local.skip(step, DeclineCause.TORN.because("of the test"))
        until(partial(has_heard, late, step))
        ranks[late].save(step)
        until(partial(getattr, ranks[late].local, "is_idle"))
    keepings = [rank.save(9)[0] for rank in ranks]
    until(lambda: all(rank.local.is_idle for rank in ranks))  # one tier is complete before the other
    assert all(rank.local.complete_step == 9 for rank in ranks)
    assert all(tier_write.kept_in == {0, 1} for tier_write in keepings)
    rank0 = ranks[0].local._votes._rank0
    assert rank0 is not None
    assert rank0._votes.remembered == 0
    _close(ranks)


def test_save_does_not_wait_for_a_slot_when_no_verdict_comes_any_more(specs: list[str]) -> None:
    net = Net(2)
    ranks = [Rank(specs, rank=number, ranks=2, net=net) for number in range(2)]
    for step in (1, 2):
        assert ranks[1].save(step)[0].released.wait(60)
    got: list[TierWrite | None] = []
    waits = threading.Thread(target=lambda: got.append(ranks[1].begin(3, wait_seconds=3600)))
    waits.start()
    time.sleep(0.05)
    assert waits.is_alive(), "both slots wait for rank 0"
    with net.lock:
        net.inboxes[1].append((0, b"no frame"))
    until(lambda: got)
    assert got == [None]
    assert ranks[1].ledger.stats.skipped == {f"{tier.name}: lost": 1 for tier in ranks[1].tiers}
    waits.join()
    net.dead.add(1)  # rank 0 need not wait for it
    _close(ranks)


def test_a_rank_without_a_slot_makes_the_step_void_for_all(specs: list[str]) -> None:
    net = Net(2)
    ranks = [Rank(specs, rank=number, ranks=2, net=net) for number in range(2)]
    first = [rank.save(3)[0] for rank in ranks]
    assert all(one.released.wait(60) for one in first)
    until(lambda: all(rank.local.is_idle for rank in ranks))
    held = [ranks[0].begin(5)]
    assert held[0] is not None
    ranks[0].local.keep(held[0], Area(ranks[0].layout, 0, held[0].writers[0].memory))
    held[0].link_released.set()
    ranks[1].local.skip(5, DeclineCause.BUSY.because("of the test"))
    assert held[0].released.wait(60), "what is void is not written to its end"
    assert "void: rank 1: busy" in held[0].lost_in[1].text
    assert all(rank.kept(number) == [3] for rank in ranks for number in (0, 1))
    _close(ranks)


def test_without_a_stager_a_notice_is_over_when_its_step_is_in_the_farthest_tier_of_all(
    specs: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, log = Net(2), tmp_path / "events"
    agreed_steps = [AgreedSteps(wait_seconds_max=60) for _ in range(2)]
    ranks = [
        Rank(specs, rank=number, ranks=2, net=net, agreed_steps=agreed_steps[number], events=log)
        for number in range(2)
    ]
    saved: dict[int, int] = {}

    def train(number: int) -> None:
        for step in itertools.count():
            if agreed_steps[number].reach(step) is not None:
                saved[number] = step
                ranks[number].save(step)
                return
            time.sleep(0.001)

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    ranks[1].local.council.send_notice(Notice(NoticeKind.TERMINATE, time.time() + 600, "test"))
    for thread in threads:
        thread.join(60)
    assert saved[0] == saved[1]

    def happened() -> set[str]:
        return {line["event"] for line in read_events(log)}

    until(lambda: "emergency_staged" in happened())
    assert all(rank.kept(number) == [saved[0]] for rank in ranks for number in (0, 1))
    assert f"is kept in {specs[1]} of every rank's machine, " in caplog.text
    assert all(one.notice is not None and one.notice.rank == 1 for one in agreed_steps)
    _close(ranks)
    assert "emergency_failed" not in happened()


def test_a_proof_is_written_once_its_slice_is_sealed(specs: list[str]) -> None:
    rank = Rank(specs)
    tier_write, area = rank.save(3, frames=1)
    assert rank.local.keeps_proofs
    assert rank.local.last_begun == (1, 3)
    rank.local.keep_proof((1, 3), {"step": 4})
    assert rank.proofs(3) == []
    area.fill(3)
    assert tier_write.released.wait(60)
    until(lambda: rank.proofs(3) == [{"step": 4}] * 2)
    rank.save(5)
    rank.local.keep_proof((1, 5), {"step": 6})
    rank.local.keep_proof((1, 9), {"step": 10})  # of a step that no tier has begun
    rank.local.close(60)
    assert (rank.proofs(3), rank.proofs(5)) == ([{"step": 4}] * 2, [{"step": 6}] * 2)


def test_a_proof_of_a_step_that_was_given_up_goes_with_it(specs: list[str]) -> None:
    rank = Rank(specs)
    tier_write, _ = rank.save(3, frames=1)
    rank.local.keep_proof((1, 3), {"step": 4})
    tier_write.cancel(DeclineCause.FAILED.because("of the test"))
    assert tier_write.released.wait(60)
    rank.local.close(60)
    assert rank.kept(0) == rank.kept(1) == []
    assert not any(threads._verdicts for threads in rank.lanes)


def test_a_proof_that_a_device_refuses_costs_nothing_but_itself(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(rank.tiers[1], "keep_proof", refuse)
    assert rank.save(3)[0].released.wait(60)
    rank.local.keep_proof((1, 3), {"step": 4})
    until(lambda: "disk: the disk is full" in caplog.text)
    until(lambda: rank.proofs(3) == [{"step": 4}])
    assert rank.kept(0) == rank.kept(1) == [3]


def test_a_tier_that_fails_loses_its_step_and_nothing_else(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(CachedFile, "write", fail)
        for step in (3, 5):
            assert rank.save(step)[0].released.wait(60)
            until(lambda: rank.local.is_idle)
    assert caplog.text.count("is not kept in tier file") == 1, "once for the reason, not once for each step"
    assert rank.kept(0)[0] == 5
    assert rank.save(7)[0].released.wait(60)
    until(lambda: rank.kept(1) == [7])
    assert rank.ledger.stats.skipped == {f"{rank.tiers[1].name}: failed": 2}


def test_a_tier_that_is_too_small_is_refused_at_first_and_left_out_later(
    specs: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(specs)

    def refuse(*_: object) -> None:
        raise ConfigError("too small: of the test")

    monkeypatch.setattr(rank.tiers[1], "prepare", refuse)
    rank.layout = laid_out(1, chunks=9)
    rank.local.prepare(rank.layout)
    assert "takes nothing more: too small" in caplog.text
    tier_write, _ = rank.save(3)
    assert tier_write.released.wait(60)
    assert tier_write.kept_in == {0}
    rank.local.close(60)
    fresh = Rank(specs, prepared=False)
    monkeypatch.setattr(fresh.tiers[1], "prepare", refuse)
    with pytest.raises(ConfigError, match="too small"):
        fresh.local.prepare(rank.layout)
    fresh.local.close(60)


def test_a_device_that_hangs_is_given_up_and_used_again_when_it_answers(
    specs: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The area comes back, the step is kept where it can be, the next one is not even tried, and `close` ends."""
    going, plain = threading.Event(), CachedFile.write
    going.set()

    def write(self: CachedFile, offset: int, view: memoryview) -> None:
        assert going.wait(60)
        plain(self, offset, view)

    monkeypatch.setattr(CachedFile, "write", write)
    rank = Rank(specs, tier_seconds_max=2.0)  # what does return has so long for it
    assert rank.save(3)[0].released.wait(20)
    until(lambda: rank.local.is_idle)
    going.clear()
    tier_write, _ = rank.save(5)
    assert tier_write.released.wait(20)
    assert (tier_write.kept_in, tier_write.lost_in[1].cause) == ({0}, DeclineCause.HANGS)
    assert caplog.text.count("takes nothing until its device answers: it hangs") == 1
    until(lambda: rank.kept(0) == [5, 3])
    tier_write, _ = rank.save(7)
    assert tier_write.writers.keys() == {0}
    assert tier_write.released.wait(20)
    assert rank.ledger.stats.skipped[f"{specs[1]}: hangs"] == 2
    going.set()
    until(lambda: "answers again" in caplog.text)
    assert not rank.lanes[1].calls.hang_reason
    tier_write, _ = rank.save(9)
    assert tier_write.released.wait(20)
    assert tier_write.kept_in == {0, 1}
    until(lambda: rank.kept(1) == [9, 3])
    assert rank.bytes_of(3, 1) == {3}
    going.clear()
    rank.save(11)
    rank.local.close(60)
    assert "hangs: the write of frame" in caplog.records[-1].message
    going.set()


def test_a_device_that_hangs_at_the_start_is_an_error_that_names_it(
    specs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    going = threading.Event()
    monkeypatch.setattr(SlotFiles, "open", lambda *_: going.wait(60))
    with pytest.raises(
        StoreError, match=r"tier memory:.* hangs: making room for slices has not returned for 0.2 s"
    ):
        Rank(specs, tier_seconds_max=0.2, start_seconds_max=0.2)
    going.set()


def test_an_area_comes_back_though_the_device_still_reads_it(
    specs: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `save()` asks for it when tensors have changed their shapes: it may not wait for a call that hangs."""
    going, writing, plain = threading.Event(), threading.Event(), CachedFile.write
    going.set()

    def write(self: CachedFile, offset: int, view: memoryview) -> None:
        writing.set()
        assert going.wait(60)
        plain(self, offset, view)

    monkeypatch.setattr(CachedFile, "write", write)
    rank = Rank(specs[1:], tier_writers=1)
    assert rank.save(3)[0].released.wait(20)
    until(lambda: rank.local.is_idle)
    going.clear()
    writing.clear()
    tier_write, _ = rank.save(5)
    assert writing.wait(20)
    assert not tier_write.released.is_set()
    rank.local.release_area(tier_write)
    assert tier_write.released.is_set(), "nobody may wait for the device here"
    assert tier_write.lost_in == {
        0: DeclineCause.HANGS.because("the tier has not released the staging area in time")
    }
    assert rank.ledger.stats.skipped == {f"{specs[1]}: hangs": 1}
    assert rank.begin(6) is None, "its slot is the device's still, and the other one holds step 3"
    going.set()
    steps = itertools.count(7)

    def is_free() -> bool:
        again = rank.begin(next(steps))
        if again is not None:
            rank.local.drop(again, DeclineCause.BUSY.because("of the test"))
        return again is not None

    until(is_free)
    last = next(steps)
    tier_write, _ = rank.save(last)
    assert tier_write.released.wait(20)
    assert tier_write.kept_in == {0}
    until(lambda: rank.local.is_idle)
    assert (rank.kept(), rank.bytes_of(3), rank.bytes_of(last)) == ([last, 3], {3}, {last % 256})
    assert "step 5 is not kept" in caplog.text
    rank.local.close(60)


def test_persistent_memory_that_hangs_gives_no_slot_and_holds_up_no_step(
    specs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its slot is unsealed in `begin`, which the training thread calls: it goes on without, and later with it again."""
    going, flushing, plain = threading.Event(), threading.Event(), PmFile.flush
    going.set()

    def flush(self: PmFile) -> None:
        flushing.set()
        assert going.wait(60)
        plain(self)

    monkeypatch.setattr(PmFile, "flush", flush)
    (tmp_path / "pm").mkdir()
    pm = f"pm:{tmp_path / 'pm'}"
    rank = Rank([pm, specs[1]], tier_seconds_max=2.0)  # what does return has so long for it
    for step in (3, 5):  # both slots are sealed: the next one has to be unsealed
        assert rank.save(step)[0].released.wait(20)
        until(lambda: rank.local.is_idle)
    going.clear()
    flushing.clear()
    tier_write = rank.begin(7)
    assert flushing.is_set()
    assert tier_write is not None
    assert tier_write.writers.keys() == {1}
    hangs = f"tier {pm} gives no slot for step 7: tier {pm} hangs: a slot for step 7 has not returned for 2 s"
    assert hangs in caplog.text
    rank.local.drop(tier_write, DeclineCause.BUSY.because("of the test"))
    until(lambda: rank.lanes[0].calls.hang_reason)
    until(lambda: rank.lanes[1].is_idle)  # and the other tier has its slot of step 7 back
    tier_write = rank.begin(9)
    assert tier_write is not None
    assert tier_write.writers.keys() == {1}, "it is not even asked"
    rank.local.drop(tier_write, DeclineCause.BUSY.because("of the test"))
    going.set()
    until(lambda: not rank.lanes[0].calls.hang_reason)
    tier_write, _ = rank.save(11)  # in the slot that came too late for step 7, and was given back
    assert tier_write.released.wait(20)
    assert tier_write.kept_in == {0, 1}
    until(lambda: rank.local.is_idle)
    assert (rank.kept(), rank.bytes_of(5), rank.bytes_of(11)) == ([11, 5], {5}, {11})
    rank.local.close(60)


def test_a_complete_step_found_at_start_stays_until_there_is_a_newer_one(specs: list[str]) -> None:
    """A relaunch finds 3 on both ranks and 5 on one: the first slot to be used is not that of step 3."""
    net = Net(2)
    ranks = [Rank(specs, rank=number, ranks=2, net=net) for number in range(2)]
    assert all(rank.save(3)[0].released.wait(60) for rank in ranks)
    until(lambda: all(rank.local.is_idle for rank in ranks))
    assert ranks[0].save(5)[0].released.wait(60)
    for rank in ranks:  # as a kill would end them: nothing is said any more
        net.cut |= {0, 1}
        for tier in rank.tiers:
            tier.close()
    found = TierInventory(1, (((1, 3),),) * 2, (((1, 5),),) * 2)
    again = Rank(specs, rank=0, ranks=2, net=Net(2), attempt=2, inventory=found)
    assert again.begin(9) is not None
    assert again.kept(0) == [3]
    assert again.kept(1)[-1] == 3


@pytest.mark.parametrize("whole_in", [frozenset(), frozenset({"elsewhere"})], ids=["nowhere", "elsewhere"])
def test_a_damaged_step_gives_its_slot_away_if_it_is_whole_elsewhere(
    specs: list[str], whole_in: frozenset[str]
) -> None:
    """Both tiers have 3 and 5, all seals; restore has taken 5, though a frame of it is damaged in both."""
    rank = Rank(specs)
    for step in (3, 5):
        assert rank.save(step)[0].released.wait(20)
        until(lambda: rank.local.is_idle)
    rank.local.close(20)
    attempt = 2
    for _ in range(2):  # the first relaunch is killed while its first step is on its way
        found = TierInventory(1, (((1, 5), (1, 3)),) * 2, NOTHING)
        again = Rank(specs, attempt=attempt, inventory=found, prepared=False)
        again.local.set_restored((1, 5), whole_in)
        again.local.prepare(again.layout)
        again.save(9, frames=1)
        until_kept(again, [3] if whole_in else [5])
        for tier in again.tiers:
            tier.close()
        attempt += 1


def test_a_step_that_one_rank_has_given_up_already_stands_in_nobodys_way(specs: list[str]) -> None:
    """The other rank was killed before it did: here the record still calls 5 complete, and it is newer than 3."""
    rank = Rank(specs)
    for step in (3, 5):
        assert rank.save(step)[0].released.wait(20)
        until(lambda: rank.local.is_idle)
    rank.local.close(20)
    found = TierInventory(1, (((1, 3),),) * 2, (((1, 5),),) * 2)
    again = Rank(specs, attempt=2, inventory=found, prepared=False)
    again.local.set_restored((1, 5), {"elsewhere"})
    again.local.prepare(again.layout)
    again.save(9, frames=1)
    until_kept(again, [3])


def until_kept(rank: Rank, steps: list[int]) -> None:
    """Both tiers have these steps and no others."""
    until(lambda: [rank.kept(number) for number in range(2)] == [steps, steps])


def _close(ranks: list[Rank]) -> None:
    threads = [threading.Thread(target=rank.local.close, args=(60,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
