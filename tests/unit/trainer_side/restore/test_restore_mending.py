"""Restore from damaged or missing local tiers: repaired from other sources, and never a wrong byte."""

from __future__ import annotations

import itertools
import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.crc import crc32
from holdfast.errors import DamageError, StoreError
from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import Layout
from holdfast.image.slices import area_bytes, frames_of
from holdfast.telemetry.events import EventLog
from tests.support.restoring import CountingStore, Ranks
from tests.support.slices import DictTier
from tests.unit.trainer_side.tiered import Vector, assert_step, bring_back, saved
from trainer_side.restore import targets as targets_module
from trainer_side.restore.restore import restore
from trainer_side.tiers.tier import Nearness, SealedSlice

_SOME = (Nearness.MEMORY, Nearness.FILE)
_SMALL = {step: saved(step, size=2000) for step in (4, 5)}


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "run")


def test_a_damaged_frame_is_taken_from_the_store_and_named(
    store: CountingStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = saved(5)
    made.publish(Path(store.url))
    tiers = [DictTier(Nearness.NVME).put(made, rank) for rank in range(2)]
    frame = frames_of(made.layout, 1)[2]
    tiers[1].flip(5, 1, frame.offset + 100)
    logs = [EventLog(tmp_path / f"events-{rank}", role="trainer", rank=rank) for rank in range(2)]
    targets = [Vector(0.0) for _ in range(2)]
    outcome = Ranks(2).run(
        lambda peers: restore(
            {"model": targets[peers.rank]}, store, peers, events=logs[peers.rank], tiers=[tiers[peers.rank]]
        )
    )
    results = assert_step(outcome, targets, 5)
    assert [(offset, nbytes) for offset, nbytes in store.requests] == [
        (frame.chunk * made.layout.chunk_bytes, made.layout.chunk_bytes)
    ]
    for result in results:
        (named,) = result.mended
        assert named.startswith(
            "rank 1: nvme:test: rank 1's slice of step 5 (attempt 1) in dict slot 0: frame 2 "
        )
        assert "CRC-32 expected" in named
        assert result.skipped == []
        assert result.whole_in == {store.url}
    assert caplog.text.count("frame 2 ") == 1
    for rank, log in enumerate(logs):
        log.close()
        lines = [json.loads(line) for line in (tmp_path / f"events-{rank}").read_text().splitlines()]
        assert [line["event"] for line in lines] == ["damaged", "restore"]
        assert lines[1]["mended"] == [lines[0]["reason"]]
        assert lines[1]["bytes_read"] == sum(use["bytes"] for use in lines[1]["sources"].values())
    assert {*results[0].sources, *results[1].sources} == {"nvme:test", store.url}


@pytest.mark.parametrize("where", ["head", "tail"])
def test_damage_in_the_structure_is_taken_from_another_rank(store: CountingStore, where: str) -> None:
    made = saved(5)
    tiers = [DictTier().put(made, 0, 1), DictTier(Nearness.NVME).put(made, 0, 1)]
    slice_rank = 0 if where == "head" else 1
    frame = frames_of(made.layout, slice_rank)[0 if where == "head" else -1]
    tiers[0].flip(5, slice_rank, frame.offset + 60)
    results = assert_step(*bring_back(store, [[tier] for tier in tiers]), 5)
    assert len(results[0].mended) == 1
    assert results[0].mended[0].startswith("rank 0: memory:test: ")
    assert tiers[1].bytes_read >= frame.nbytes


@pytest.mark.parametrize(
    "error", [StoreError("memory:test: input/output error"), OSError(5, "input/output error")]
)
@pytest.mark.parametrize("keeper", ["own tier", "other rank", "store"])
def test_a_tier_that_breaks_is_made_good_by_the_next_source(
    store: CountingStore, keeper: str, error: Exception
) -> None:
    made = saved(5)
    broken = DictTier().put(made, 1)
    broken.fails = error
    second = DictTier(Nearness.FILE).put(made, 1)
    tiers = [[DictTier().put(made, 0)], [broken]]
    if keeper == "store":
        made.publish(Path(store.url))
    else:
        tiers[0 if keeper == "other rank" else 1].append(second)
    results = assert_step(*bring_back(store, tiers), 5)
    assert len(results[0].mended) == 1  # once, however many frames
    assert "input/output error" in results[0].mended[0]
    assert (store.bytes_read > 0) == (keeper == "store")
    assert {result.whole_in for result in results} == {frozenset({store.url} if keeper == "store" else ())}


def test_every_rank_learns_which_tiers_have_the_whole_checkpoint(store: CountingStore) -> None:
    """One has a damaged frame, another lacks a slice, the third has all."""
    made = saved(5)
    memory = [DictTier().put(made, rank) for rank in range(2)]
    memory[1].flip(5, 1, frames_of(made.layout, 1)[2].offset)
    nvme = [DictTier(Nearness.NVME).put(made, 0), DictTier(Nearness.NVME)]
    file = [DictTier(Nearness.FILE).put(made, rank) for rank in range(2)]
    outcome = bring_back(store, list(zip(memory, nvme, file, strict=True)))
    assert {result.whole_in for result in assert_step(*outcome, 5)} == {frozenset({"file:test"})}


@pytest.mark.parametrize("where", ["head", "tensor", "chunks"])
def test_sizes_in_a_layout_are_not_believed(store: CountingStore, where: str) -> None:
    """Another program may write into a tier a layout with any sizes, and a seal that fits it."""
    saved(4).publish(Path(store.url))
    made = saved(5)
    huge = 1 << 56
    begin = huge if where == "head" else 100
    entry = Entry("archive/data/0", begin, huge if where == "tensor" else 4096, REPLICATED, ())
    chunk_bytes = 1 << 42 if where != "chunks" else 1 << 55
    layout = Layout(begin + entry.nbytes + 100, chunk_bytes, 1, (entry,), ())
    seal = made.seal(0).model_copy(
        update={
            "ranks": 1,
            "layout_digest": layout.digest,
            "frame_crc32s": (0,) * len(frames_of(layout, 0)),
        }
    )
    tier = DictTier().put(made, 0)
    tier._kept[0] = SealedSlice(seal, layout, "dict", 0)
    tracemalloc.start()
    try:
        results = assert_step(*bring_back(store, [[tier], []]), 4)
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()
    assert "step 5 (attempt 1)" in results[0].skipped[0]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_newest_restorable_checkpoint_comes_back_whatever_is_damaged(data: st.DataObject) -> None:
    """Against an oracle that looks for each frame in all places."""
    ranks = data.draw(st.integers(1, 3), "ranks")
    tiers = [[DictTier(near, f"{near}:{rank}") for near in _SOME] for rank in range(ranks)]
    expected, hopeless = None, False
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        for step in (5, 4):
            made = _SMALL[step]
            frames = [
                (rank, number) for rank in range(2) for number in range(len(frames_of(made.layout, rank)))
            ]
            good = set[tuple[int, int]]()
            held = set[int]()
            for tier in itertools.chain.from_iterable(tiers):
                for slice_rank in range(2):
                    if data.draw(st.booleans()):
                        tier.put(made, slice_rank)
                        held.add(slice_rank)
                        of_slice = [frame for frame in frames if frame[0] == slice_rank]
                        bad = data.draw(st.sets(st.sampled_from(of_slice), max_size=3))
                        for _, number in bad:
                            tier.flip(step, slice_rank, frames_of(made.layout, slice_rank)[number].offset + 1)
                        good |= set(of_slice) - bad
            stored = data.draw(st.booleans())
            if stored:
                manifest = made.publish(root)
                flipped = data.draw(st.sets(st.integers(0, made.layout.chunks - 1), max_size=2))
                image = bytearray((root / manifest.file).read_bytes())
                for chunk in flipped:
                    image[chunk * made.layout.chunk_bytes + 1] ^= 8
                (root / manifest.file).write_bytes(image)
                good |= {
                    frame
                    for frame in frames
                    if frames_of(made.layout, frame[0])[frame[1]].chunk not in flipped
                }
            if expected is None and good == set(frames):
                expected = step
            hopeless = hopeless or stored or held == {0, 1}
        outcome: Any
        try:
            outcome, targets = bring_back(CountingStore(root), tiers, size=2000)
        except DamageError:
            assert expected is None
            assert hopeless
            return
        if expected is None:
            assert not hopeless
            assert outcome == [None] * ranks
        else:
            assert_step(outcome, targets, expected)


@pytest.mark.parametrize("good_reads", [0, 3])
def test_a_tier_that_breaks_is_not_asked_again(store: CountingStore, good_reads: int) -> None:
    """Each read may take a broken device many seconds to refuse. With no good read it breaks while the tree is read."""
    made = saved(5)
    made.publish(Path(store.url))
    broken = DictTier().put(made, 1)
    broken.fails, broken.good_reads = StoreError("memory:test: input/output error"), good_reads
    results = assert_step(*bring_back(store, [[DictTier().put(made, 0)], [broken]], threads=1), 5)
    assert broken.failed_reads == 1
    assert [len(result.mended) for result in results] == [1, 1]


def test_a_slice_with_damage_in_several_places_is_named_once(store: CountingStore) -> None:
    made = saved(5)
    made.publish(Path(store.url))
    tier = DictTier().put(made, 0, 1)
    frames = frames_of(made.layout, 1)
    for frame in (frames[0], frames[3], frames[-1]):  # the last one is damaged while the tree is read, too
        tier.flip(5, 1, frame.offset + 1)
    (result,) = assert_step(*bring_back(store, [[tier]]), 5)
    assert len(result.mended) == 1


def test_a_tier_that_cannot_say_what_it_keeps_is_lost_and_named(
    store: CountingStore, caplog: pytest.LogCaptureFixture
) -> None:
    made = saved(5)
    made.publish(Path(store.url))
    lost = DictTier().put(made, 1)
    lost.kept_fails = StoreError("memory:test: no such device")
    assert_step(*bring_back(store, [[DictTier().put(made, 0)], [lost]]), 5)
    assert "rank 1: memory:test cannot list its slices: memory:test: no such device" in caplog.text
    # Only the other slice comes from the store.
    assert 0 < store.bytes_read < made.layout.image_bytes


def test_a_lost_tier_without_any_other_source_leads_to_the_step_before(store: CountingStore) -> None:
    saved(4).publish(Path(store.url))
    made = saved(5)
    tiers = [DictTier().put(made, rank) for rank in range(2)]
    tiers[1].flip(5, 1, frames_of(made.layout, 1)[2].offset)
    results = assert_step(*bring_back(store, [[tier] for tier in tiers]), 4)
    assert (
        "step 5 (attempt 1): frame 2 of rank 1's slice cannot be read from any tier" in results[0].skipped[0]
    )
    assert "CRC-32" in results[0].skipped[0]


def test_a_restore_with_only_damaged_checkpoints_is_an_error(store: CountingStore) -> None:
    made = saved(5)
    tier = DictTier().put(made, 0, 1)
    tier.areas[tier.slot(5, 0)] = bytearray(area_bytes(made.layout, 0) // 2)
    with pytest.raises(DamageError, match="none of 1 checkpoints"):
        bring_back(store, [[tier]])


def test_damage_in_tier_and_store_alike_leads_to_the_step_before(store: CountingStore) -> None:
    saved(4).publish(Path(store.url))
    made = saved(5)
    manifest = made.publish(Path(store.url))
    frame = frames_of(made.layout, 1)[2]
    tiers = [DictTier().put(made, rank) for rank in range(2)]
    tiers[1].flip(5, 1, frame.offset)
    path = Path(store.url) / manifest.file
    data = bytearray(path.read_bytes())
    data[frame.extents[0].offset] ^= 1
    path.write_bytes(data)
    assert_step(*bring_back(store, [[tier] for tier in tiers]), 4)


def test_a_layout_that_is_not_that_of_the_seal_is_not_believed(
    store: CountingStore, caplog: pytest.LogCaptureFixture
) -> None:
    made, other = saved(5), saved(5, size=300)
    tier = DictTier().put(made, 0, 1)
    kept = tier._kept[0]
    tier._kept[0] = type(kept)(kept.seal, other.layout, kept.place, kept.slot)
    results, _ = bring_back(store, [[tier]])
    assert results == [None]
    assert "another layout" in caplog.text


def test_a_bit_that_flips_between_ranks_is_seen(store: CountingStore) -> None:
    saved(4).publish(Path(store.url))
    made = saved(5)
    flipped: list[int] = []

    def spoil(rank: int, memory: memoryview) -> None:
        if rank == 1 and len(memory) > 2000 and len(flipped) < 1:
            flipped.append(1)
            memory[len(memory) // 2] ^= 4

    targets = [Vector(0.0) for _ in range(2)]
    tiers = [[DictTier().put(made, 0, 1)], []]
    outcome = Ranks(2, flip=spoil).run(
        lambda peers: restore(
            {"model": targets[peers.rank]},
            store,
            peers,
            events=None,
            tiers=tiers[peers.rank],
        )
    )
    assert flipped
    results = assert_step(outcome, targets, 4)
    assert "after the exchange" in results[0].skipped[0]


def test_no_byte_is_summed_twice(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []

    def spy(data: memoryview, start: int = 0) -> int:
        summed.append(data.nbytes)
        return crc32(data, start)

    made = saved(5)
    monkeypatch.setattr(targets_module, "crc32", spy)
    assert_step(*bring_back(store, [[DictTier().put(made, rank)] for rank in range(2)]), 5)
    structure_bytes = 2 * 5 * made.layout.chunk_bytes
    assert made.layout.image_bytes <= sum(summed) <= 2 * made.layout.image_bytes + structure_bytes
