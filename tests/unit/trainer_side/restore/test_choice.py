"""The checkpoint that is chosen, and the ranks that read each part of it, for any slices on any ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.image.entries import REPLICATED, Entry, Extent
from holdfast.image.layout import Layout
from holdfast.image.slices import frames_of
from tests.unit.trainer_side.restore.test_windows import manifest
from trainer_side.restore.choice import (
    NEARNESS_OF_STORE,
    STORE,
    Candidate,
    Holder,
    SkippedCheckpoint,
    SliceKey,
    StoreCandidate,
    candidates,
)
from trainer_side.restore.read_plan import FrameSource, Unit, divide, pieces_of, store_units

KEYS = st.builds(
    SliceKey,
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(["one", "other"]),
    st.sampled_from(["", "job"]),
)


@st.composite
def holders_of(draw: st.DrawFn) -> list[Holder]:
    found = []
    for key in draw(st.lists(KEYS, max_size=5)):
        for number in range(draw(st.integers(0, 5))):
            slice_rank = draw(st.integers(0, key.ranks - 1))
            near = draw(st.sampled_from([0, 1, 2, 3, NEARNESS_OF_STORE + 1]))
            found.append(Holder(key, slice_rank, draw(st.integers(0, 2)), number, near, "tier", "place"))
    return found


STORED = st.lists(
    st.builds(
        StoreCandidate,
        st.just(0),
        st.integers(1, 3),
        st.integers(0, 3),
        st.integers(1, 3),
        st.sampled_from(["one", "other"]),
        st.sampled_from(["", "", "bad"]),
        st.sampled_from(["", "", "rank 1 drifted"]),
    ),
    max_size=5,
    unique_by=lambda one: (one.attempt, one.step),
)


@given(found=holders_of(), store_listing=STORED)
def test_newest_first_each_whole_and_nothing_is_left_out(
    found: list[Holder], store_listing: list[StoreCandidate]
) -> None:
    store_listing = [one._replace(number=number) for number, one in enumerate(store_listing)]
    listed = candidates(found, store_listing)
    assert listed == candidates(list(reversed(found)), store_listing), (
        "every rank must come to the same order"
    )
    drifted = [isinstance(item, Candidate) and bool(item.drift) for item in listed]
    assert drifted == sorted(drifted), "those whose replicas were not the same come last"
    for kind in (False, True):
        orders = [
            (item.attempt, item.step) for item, is_so in zip(listed, drifted, strict=True) if is_so is kind
        ]
        assert orders == sorted(orders, reverse=True)
    for item in listed:
        if isinstance(item, SkippedCheckpoint):
            assert item.reason
            continue
        if item.stored != STORE:
            one = store_listing[item.stored]
            assert not one.fault
            assert (one.attempt, one.step) == (item.attempt, item.step)
            if item.key is not None:
                assert (one.ranks, one.digest) == (item.key.ranks, item.key.digest)
        if item.key is None:
            assert item.stored != STORE
            continue
        whole = set(item.slices) == set(range(item.key.ranks))
        assert whole or item.stored != STORE
        for rank, some in item.slices.items():
            assert {one.key for one in some} == {item.key}, "slices of two checkpoints are never mixed"
            assert {one.slice_rank for one in some} == {rank}
            assert list(some) == sorted(some, key=lambda one: (one.nearness, one.rank, one.number))
    of_tiers = [item.key for item in listed if isinstance(item, Candidate) and item.key is not None]
    assert len(of_tiers) == len(set(of_tiers))
    passed = [item for item in listed if isinstance(item, SkippedCheckpoint)]
    assert len(of_tiers) + sum(not item.was_complete for item in passed) == len(
        {holder.key for holder in found}
    )
    of_store = [item for item in listed if isinstance(item, Candidate) and item.key is None]
    assert len(of_store) == sum(not one.fault for one in store_listing)
    assert sum(item.was_complete for item in passed) == sum(bool(one.fault) for one in store_listing)


@given(found=holders_of(), store_listing=STORED)
def test_equal_candidates_in_tiers_come_before_the_store(
    found: list[Holder], store_listing: list[StoreCandidate]
) -> None:
    store_listing = [one._replace(number=number) for number, one in enumerate(store_listing)]
    listed = [item for item in candidates(found, store_listing) if isinstance(item, Candidate)]
    for before, after in itertools.pairwise(listed):
        if (before.attempt, before.step) == (after.attempt, after.step):
            assert before.key is not None


def layout_of(ranks: int, chunk_count: int, owners: Sequence[int], last_bytes: int) -> Layout:
    """Entries of 3,000 bytes between literals, some owned."""
    image_bytes = (chunk_count - 1) * 4096 + last_bytes
    entries = []
    offset = 10
    for number, owner in enumerate(owners):
        if offset + 3000 > image_bytes - 40:
            break
        who = owner if owner < ranks else REPLICATED
        entries.append(Entry(f"archive/data/{number}", offset, 3000, who, ()))
        offset += 3100
    return Layout(image_bytes, 4096, ranks, tuple(entries))


LAYOUTS = st.builds(
    layout_of,
    st.integers(1, 4),
    st.integers(1, 12),
    st.lists(st.sampled_from([REPLICATED, REPLICATED, 0, 1, 3]), max_size=14),
    st.integers(1, 4096),
)


@st.composite
def rigs(draw: st.DrawFn) -> tuple[Layout, Candidate, int]:
    """A layout, a candidate of it that is whole, and a number of ranks now."""
    layout, ranks = draw(LAYOUTS), draw(st.integers(1, 4))
    key = SliceKey(1, 5, layout.ranks, layout.digest, "")
    stored = draw(st.sampled_from([STORE, 0]))
    found = []
    numbers = [0] * ranks
    for slice_rank in range(layout.ranks):
        for _ in range(draw(st.integers(1 if stored == STORE else 0, 3))):
            rank = draw(st.integers(0, ranks - 1))
            near = draw(st.sampled_from([0, 2, NEARNESS_OF_STORE + 1]))
            found.append(Holder(key, slice_rank, rank, numbers[rank], near, "tier", "place"))
            numbers[rank] += 1
    store_listing = [] if stored == STORE else [StoreCandidate(0, 1, 5, layout.ranks, layout.digest, "")]
    return layout, next(c for c in candidates(found, store_listing) if isinstance(c, Candidate)), ranks


def covered(units: Sequence[Unit]) -> list[Extent]:
    return sorted(extent for unit in units for extent in unit.extents)


@given(rig=rigs(), data=st.data())
def test_every_byte_is_read_once_until_no_source_is_left(
    rig: tuple[Layout, Candidate, int], data: st.DataObject
) -> None:
    layout, candidate, ranks = rig
    pieces = pieces_of(layout)
    left, failed, broken = dict(pieces), set[tuple[int, FrameSource]](), set[FrameSource]()
    read: list[Unit] = []
    for _ in range(100):
        units, lost = divide(
            candidate, left, ranks, chunk_bytes=layout.chunk_bytes, failed=failed, broken=broken
        )
        assert units == sorted(units, key=lambda unit: unit.chunk)
        assert sorted([*lost, *(piece for unit in units for piece in unit.pieces)]) == sorted(left)
        for number in lost:  # every source of it was tried
            options = {
                FrameSource(one.rank, one.number)
                for one in candidate.slices.get(pieces[number].slice_rank, ())
            }
            assert candidate.stored == STORE or (number, FrameSource(-1, STORE)) in failed
            assert all(option in broken or (number, option) in failed for option in options)
        bad: list[int] = []
        gone = set[FrameSource]()
        for unit in units:
            assert 0 <= unit.reader < ranks
            source = FrameSource(-1, STORE) if unit.number == STORE else FrameSource(unit.reader, unit.number)
            assert source not in broken
            assert not any((piece, source) in failed for piece in unit.pieces)
            if unit.number != STORE:
                (piece,) = (pieces[number] for number in unit.pieces)
                frame = frames_of(layout, piece.slice_rank)[unit.frame]
                assert (frame.chunk, frame.extents) == (unit.chunk, unit.extents)
                holder = next(
                    one
                    for one in candidate.slices[piece.slice_rank]
                    if (one.rank, one.number) == (unit.reader, unit.number)
                )
                assert holder.slice_rank == piece.slice_rank
            if unit.number != STORE and data.draw(st.integers(0, 3)) == 0:
                failed.update((piece, source) for piece in unit.pieces)
                bad += unit.pieces
                if data.draw(st.booleans()):
                    gone.add(source)
            else:
                read.append(unit)
        broken |= gone
        left = {number: pieces[number] for number in bad}
        if lost or not left:
            break
    else:
        raise AssertionError("it never ends")
    if not lost:
        position = 0
        for extent in covered(read):
            assert extent.offset == position
            position = extent.end
        assert position == layout.image_bytes


@given(rig=rigs())
def test_the_nearest_source_of_a_frame_is_read(rig: tuple[Layout, Candidate, int]) -> None:
    layout, candidate, ranks = rig
    pieces = pieces_of(layout)
    units, lost = divide(candidate, pieces, ranks, chunk_bytes=layout.chunk_bytes)
    assert lost == []
    store_chunks = {unit.chunk for unit in units if unit.number == STORE}
    for unit in units:
        if unit.number == STORE:
            assert covered([unit]) == sorted(e for number in unit.pieces for e in pieces[number].extents)
            # Some frame of it is nowhere nearer.
            assert any(
                not any(
                    one.nearness < NEARNESS_OF_STORE
                    for one in candidate.slices.get(pieces[number].slice_rank, ())
                )
                for number in unit.pieces
            )
            continue
        some = candidate.slices[pieces[unit.pieces[0]].slice_rank]
        used = next(one for one in some if (one.rank, one.number) == (unit.reader, unit.number))
        assert used.nearness == some[0].nearness
        assert unit.chunk not in store_chunks, "a chunk that is read whole anyway gives all its frames"


@given(layout=LAYOUTS, ranks=st.integers(1, 4))
def test_slices_that_all_ranks_have_are_shared_out_evenly(layout: Layout, ranks: int) -> None:
    key = SliceKey(1, 5, layout.ranks, layout.digest, "")
    found = [
        Holder(key, slice_rank, rank, slice_rank, 0, "tier", "place")
        for rank in range(ranks)
        for slice_rank in range(layout.ranks)
    ]
    (candidate,) = candidates(found, [])
    assert isinstance(candidate, Candidate)
    units, _ = divide(candidate, pieces_of(layout), ranks, chunk_bytes=layout.chunk_bytes)
    loads = [0] * ranks
    for unit in units:
        loads[unit.reader] += sum(extent.nbytes for extent in unit.extents)
    assert max(loads) - min(loads) <= layout.chunk_bytes


@given(layout=LAYOUTS, begin=st.integers(0, 30_000), nbytes=st.integers(1, 9000))
def test_pieces_within_an_extent_cover_it(layout: Layout, begin: int, nbytes: int) -> None:
    wish = Extent(begin, nbytes)
    some = pieces_of(layout, [wish])
    assert some.items() <= pieces_of(layout).items()
    reached = {
        at
        for piece in some.values()
        for extent in piece.extents
        for at in range(max(extent.offset, begin), min(extent.end, wish.end))
    }
    assert reached == set(range(begin, min(wish.end, layout.image_bytes)))
    for piece in some.values():
        assert any(max(e.offset, begin) < min(e.end, wish.end) for e in piece.extents)


@given(
    chunk_bytes=st.integers(1, 50), sizes=st.lists(st.integers(1, 100), max_size=6), ranks=st.integers(1, 5)
)
def test_a_portable_file_is_shared_out_in_whole_chunks(
    chunk_bytes: int, sizes: list[int], ranks: int
) -> None:
    described = manifest(chunk_bytes, [(3, size) for size in sizes])
    units = store_units(described, ranks)
    assert [unit.chunk for unit in units] == list(range(-(-described.image_bytes // chunk_bytes)))
    assert [unit.reader for unit in units] == sorted(unit.reader for unit in units)
    position = 0
    for unit in units:
        (extent,) = unit.extents
        assert extent.offset == position
        position = extent.end
    assert position == described.image_bytes
    counts = [sum(unit.reader == rank for unit in units) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


def drifting(step: int, **said: str) -> list[Holder]:
    """Slices of two ranks, which say this of their replicas."""
    key = SliceKey(1, step, 2, "one", "job")
    return [
        Holder(
            key,
            rank,
            rank,
            0,
            0,
            "tier",
            "place",
            replicas=said.get(f"rank{rank}", ""),
            drift=said.get("drift", ""),
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("said", "is_drifted"),
    [
        ({"rank0": "aa", "rank1": "aa"}, False),
        ({"rank0": "aa", "rank1": "bb"}, True),
        ({"rank0": "aa"}, False),
        ({"drift": "rank 1 drifted"}, True),
    ],
)
def test_slices_say_whether_their_replicas_were_the_same(said: dict[str, str], is_drifted: bool) -> None:
    older = drifting(4, rank0="cc", rank1="cc")
    listed = [item for item in candidates([*drifting(5, **said), *older], []) if isinstance(item, Candidate)]
    assert [item.step for item in listed] == ([4, 5] if is_drifted else [5, 4])
    assert [bool(item.drift) for item in listed] == [False, is_drifted]


def test_the_store_knows_it_of_slices_too() -> None:
    stored = [StoreCandidate(0, 1, 5, 2, "one", "", "rank 1 drifted"), StoreCandidate(1, 1, 4, 2, "one", "")]
    listed = candidates(drifting(5), stored)
    assert [(item.step, item.drift) for item in listed if isinstance(item, Candidate)] == [
        (4, ""),
        (5, "rank 1 drifted"),
        (5, "rank 1 drifted"),
    ]
