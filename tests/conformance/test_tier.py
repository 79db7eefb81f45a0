"""Rules for every tier: one suite, with each rule of `trainer_side.tiers.tier` at least once."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, DamageError, StoreError
from holdfast.image.layout import Layout
from holdfast.image.slices import area_bytes, frames_of
from tests.support.tiers import RANKS, RUN, aligned, check, image, put, read, save, slice_of, write
from trainer_side.tiers.medium import load_libpmem
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.tier import Nearness, Tier


def _specs(directory: Path) -> dict[str, str]:
    return {
        "memory": f"memory:{directory}",
        "pm": f"pm:{directory}",
        "pm-libpmem": f"pm:{directory}",
        "nvme": f"nvme:{directory}",
        "file": f"file:{directory}",
    }


@dataclass
class Rig:
    """A tier's location, which any number of processes may open."""

    spec: str
    run: str = RUN
    opened: list[Tier] = field(default_factory=list)

    def open(self, *, slots: int = 2, run: str | None = None) -> Tier:
        self.opened.append(open_tier(self.spec, run or self.run, slots=slots))
        return self.opened[-1]

    def ready(self, layout: Layout, rank: int = 0, *, slots: int = 2) -> Tier:
        tier = self.open(slots=slots)
        tier.prepare(layout, rank)
        return tier

    def again(self, tier: Tier, layout: Layout, rank: int = 0, *, slots: int = 2) -> Tier:
        """Open the tier as the next process does after the first has died."""
        tier.close()
        return self.ready(layout, rank, slots=slots)


@pytest.fixture(params=["memory", "pm", "pm-libpmem", "nvme", "file"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Provide each tier in turn, with an empty run."""
    kind = str(request.param)
    monkeypatch.delenv("PMEM_IS_PMEM_FORCE", raising=False)
    if kind == "pm-libpmem":
        if load_libpmem() is None:
            pytest.skip("libpmem.so.1 is not installed (package libpmem1)")
        monkeypatch.setenv("PMEM_IS_PMEM_FORCE", "1")
    found = Rig(_specs(tmp_path / "tier")[kind])
    yield found
    for tier in found.opened:
        tier.close()


def test_a_new_tier_holds_nothing(rig: Rig) -> None:
    tier = rig.open()
    assert tier.kept_slices() == []
    assert tier.begin(1, 1) is None
    tier.prepare(image().layout, 0)
    assert tier.kept_slices() == []
    assert tier.writers >= 1
    assert tier.write_mode
    assert tier.nearness in Nearness


def test_a_slice_is_there_when_it_is_sealed(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    writer = write(tier, made, 0, 1, 5)
    check(tier, made)
    assert writer.seal({"copy_seconds": 0.5})
    check(tier, made, (1, 5))
    check(rig.open(), made, (1, 5))
    (kept,) = tier.kept_slices()
    assert kept.seal.record == {"copy_seconds": 0.5}
    assert kept.seal.run == "kelp"
    assert (kept.seal.ranks, kept.seal.layout_digest) == (RANKS, made.layout.digest)


def test_frames_may_be_written_in_any_order_from_any_thread(rig: Rig) -> None:
    made = image(11)
    tier = rig.ready(made.layout)
    writer = tier.begin(1, 7)
    assert writer is not None
    pieces = list(enumerate(slice_of(made, 0, 1007)))
    assert len(pieces) > 4
    random.Random(5).shuffle(pieces)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: put(writer, made.layout, 0, *piece), pieces))
    assert writer.seal({})
    check(tier, made, (1, 7))


def test_newest_first_and_the_newest_complete_step_stays(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    for step in range(1, 6):
        save(tier, made, 0, 1, step)
        kept = [one.seal.order for one in tier.kept_slices()]
        assert kept == sorted(kept, reverse=True)
        assert kept[0] == (1, step)
        assert len(kept) <= 2


def test_a_pending_slice_is_kept_until_its_step_is_complete_or_void(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 1)
    save(tier, made, 0, 1, 2, complete=False)
    assert tier.begin(1, 3) is None
    check(tier, made, (1, 2), (1, 1))
    tier.void(1, 2)
    writer = write(tier, made, 0, 1, 3)
    check(rig.open(), made, (1, 1))
    assert writer.seal({})
    assert tier.begin(1, 4) is None
    tier.complete(1, 3)
    save(tier, made, 0, 1, 4)
    check(tier, made, (1, 4), (1, 3))


def test_a_slot_is_unsealed_before_it_is_written_to(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 1)
    save(tier, made, 0, 1, 2)
    writer = tier.begin(1, 3)
    assert writer is not None
    put(writer, made.layout, 0, 0, slice_of(made, 0, 1003)[0])
    check(rig.open(), made, (1, 2))


def test_an_abandoned_slice_gives_its_slot_back(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    for step in range(1, 5):
        writer = tier.begin(1, step)
        assert writer is not None
        put(writer, made.layout, 0, 0, slice_of(made, 0, 1000 + step)[0])
        writer.abandon()
        writer.abandon()
        with pytest.raises(StoreError, match="over"):
            put(writer, made.layout, 0, 1, slice_of(made, 0, 1000 + step)[1])
    check(tier, made)
    save(tier, made, 0, 1, 5)
    save(tier, made, 0, 1, 6)
    check(tier, made, (1, 6), (1, 5))


def test_a_later_slice_that_is_ready_first_wins(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout, slots=3)
    slow = write(tier, made, 0, 1, 1)
    save(tier, made, 0, 1, 2)
    assert not slow.seal({})
    check(tier, made, (1, 2))
    save(tier, made, 0, 1, 3)
    save(tier, made, 0, 1, 4)
    assert tier.kept_slices()[0].seal.order == (1, 4)


def test_an_older_step_is_not_begun_when_a_newer_one_is_complete(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 4)
    assert tier.begin(1, 3) is None
    assert tier.begin(1, 4) is None


def test_a_voided_step_is_not_sealed(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 1)
    writer = write(tier, made, 0, 1, 2)
    tier.void(1, 2)
    assert not writer.seal({})
    check(tier, made, (1, 1))
    save(tier, made, 0, 1, 3)


def test_a_slice_with_a_frame_missing_is_not_sealed(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    writer = tier.begin(1, 1)
    assert writer is not None
    put(writer, made.layout, 0, 1, slice_of(made, 0, 1001)[1])
    with pytest.raises(StoreError, match="missing, the first is 0"):
        writer.seal({})
    writer.abandon()
    check(tier, made)


def test_a_frame_of_another_size_is_refused(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    writer = tier.begin(1, 1)
    assert writer is not None
    frame = frames_of(made.layout, 0)[0]
    with pytest.raises(StoreError, match=f"expected {frame.padded_bytes}"):
        writer.write(0, aligned(b"", frame.padded_bytes + 4096), 0)
    writer.abandon()


def test_memory_of_a_slot_is_the_slot(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    writer = tier.begin(1, 1)
    assert writer is not None
    if writer.memory is None:
        assert writer.copy is None
        writer.abandon()
        return
    assert len(writer.memory) == area_bytes(made.layout, 0)
    assert writer.copy is not None
    writer.abandon()
    del writer
    save(tier, made, 0, 1, 2)
    check(tier, made, (1, 2))


def test_another_process_finds_what_was_sealed_and_goes_on(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 1)
    save(tier, made, 0, 1, 2)
    tier = rig.again(tier, made.layout)
    check(tier, made, (1, 2), (1, 1))
    tier.complete(1, 2)
    save(tier, made, 0, 2, 3)
    check(tier, made, (2, 3), (1, 2))


def test_a_process_that_is_told_nothing_keeps_the_step_that_was_complete(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 1)
    save(tier, made, 0, 1, 2, complete=False)
    for attempt in range(2, 5):
        tier = rig.again(tier, made.layout)
        writer = write(tier, made, 0, attempt, 2)
        assert (1, 1) in [kept.seal.order for kept in tier.kept_slices()]
        writer.abandon()
    save(tier, made, 0, 4, 2)
    assert tier.kept_slices()[0].seal.order == (4, 2)


def test_a_found_step_that_is_not_whole_gives_way_to_the_newest_that_is(rig: Rig) -> None:
    """The step has all its seals, but restore found damage: the next save reuses its slot, not the good step's."""
    made = image(ranks=1)
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 1)
    save(tier, made, 0, 1, 2)
    for attempt in (2, 3):  # the first of these processes dies before it seals a step
        tier = rig.again(tier, made.layout)
        tier.complete(1, 1)
        tier.void(1, 2)
        writer = write(tier, made, 0, attempt, 3)
        assert [kept.seal.order for kept in tier.kept_slices()] == [(1, 1)]
        writer.abandon()
        assert tier.begin(attempt, 3) is not None, "its slot is free again"
    tier = rig.again(tier, made.layout)
    save(tier, made, 0, 4, 3)
    save(tier, made, 0, 4, 4)
    check(tier, made, (4, 4), (4, 3))


def test_attempts_come_before_steps(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 900)
    save(tier, made, 0, 2, 3)
    check(tier, made, (2, 3), (1, 900))


def test_every_rank_has_its_own_and_sees_all(rig: Rig) -> None:
    made = image()
    tiers = [rig.ready(made.layout, rank) for rank in range(RANKS)]
    for rank, tier in enumerate(tiers):
        save(tier, made, rank, 1, 9)
    seen = [(kept.seal.rank, kept.seal.order) for kept in rig.open().kept_slices()]
    assert sorted(seen) == [(0, (1, 9)), (1, (1, 9))]
    for rank in range(RANKS):
        check(tiers[0], made, (1, 9), rank=rank)


def test_another_run_is_not_seen(rig: Rig) -> None:
    made = image()
    save(rig.ready(made.layout), made, 0, 1, 1)
    other = rig.open(run="/mnt/store/other/kelp")
    assert other.kept_slices() == []
    other.prepare(made.layout, 0)
    save(other, made, 0, 3, 3)
    check(rig.open(), made, (1, 1))


def test_slices_of_another_layout_stay_until_a_step_of_this_one_is_complete(rig: Rig) -> None:
    first, second = image(7), image(6)
    tier = rig.ready(first.layout)
    save(tier, first, 0, 1, 1)
    tier.prepare(second.layout, 0)
    save(tier, second, 0, 1, 2, complete=False)
    assert [kept.seal.order for kept in tier.kept_slices()] == [(1, 2), (1, 1)]
    assert read(tier, tier.kept_slices()[1]) == slice_of(first, 0, 1001)
    tier.complete(1, 2)
    check(tier, second, (1, 2))
    tier.prepare(second.layout, 0)
    check(tier, second, (1, 2))


def test_more_ranks_than_now_are_found_and_go_when_a_step_is_complete(rig: Rig) -> None:
    before, after = image(7, ranks=3), image(7, ranks=1)
    tiers = [rig.ready(before.layout, rank) for rank in range(3)]
    for rank, tier in enumerate(tiers):
        save(tier, before, rank, 1, 4)
        tier.close()
    tier = rig.ready(after.layout)
    assert {kept.seal.rank for kept in tier.kept_slices()} == {0, 1, 2}
    save(tier, after, 0, 2, 5)
    assert [(kept.seal.ranks, kept.seal.order) for kept in tier.kept_slices()] == [(1, (2, 5))]


def test_a_read_past_the_slice_is_damage(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 1)
    (kept,) = tier.kept_slices()
    with pytest.raises(DamageError, match="slice"):
        tier.read_into(kept, area_bytes(made.layout, 0), aligned(b"", 1))


def test_any_part_of_a_slice_can_be_read(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout)
    save(tier, made, 0, 1, 1)
    (kept,) = tier.kept_slices()
    frame, data = frames_of(made.layout, 0)[2], slice_of(made, 0, 1001)[2]
    view = memoryview(bytearray(100))
    tier.read_into(kept, frame.offset + 7, view)
    assert bytes(view) == data[7:107]


def test_two_writers_of_one_rank_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trainer_side.tiers.slot_tier._DYING_SECONDS_MAX", 0.1
    )  # the other process does not die
    made = image()
    tier = rig.ready(made.layout)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} .* rank 0"):
        rig.ready(made.layout)
    tier.close()
    rig.ready(made.layout)


def test_seals_and_notices_of_many_steps_may_meet(rig: Rig) -> None:
    made = image()
    tier = rig.ready(made.layout, slots=4)
    sealed: list[int] = []
    guard = threading.Lock()

    def one(step: int) -> None:
        writer = tier.begin(1, step)
        if writer is None:
            return
        for number, data in enumerate(slice_of(made, 0, 1000 + step)):
            put(writer, made.layout, 0, number, data)
        if writer.seal({}):
            with guard:
                sealed.append(step)
            tier.complete(1, step)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(1, 60)))
    newest = max(sealed)
    kept = tier.kept_slices()
    assert kept[0].seal.order == (1, newest)
    for one_kept in kept:
        assert read(tier, one_kept) == slice_of(made, 0, 1000 + one_kept.seal.step)
