"""Superblock and commit sector: written ones are read back, and any flipped byte is detected."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import DamageError, HoldfastError, ProtocolError
from holdfast.image.slices import area_bytes
from tests.support.tiers import image
from tests.unit.trainer_side.slices import laid_out
from trainer_side.tiers.slot_file import newest_sector
from trainer_side.tiers.slot_format import (
    PAGE_BYTES,
    SECTOR_OFFSETS,
    SLOTS_MAX,
    Commitment,
    CommitSector,
    Superblock,
)

_DIGEST = bytes(range(32))


def _plan(slots: int = 3) -> Superblock:
    return Superblock.plan(image().layout, 1, run="kelp", run_digest=_DIGEST, slots=slots, writers=2)


def test_a_superblock_is_read_as_it_was_written() -> None:
    made = _plan()
    page = made.to_bytes()
    assert len(page) == PAGE_BYTES
    assert Superblock.from_bytes(page, source="here") == made


def test_parts_of_a_slot_file_do_not_overlap_and_are_aligned() -> None:
    layout = image().layout
    made = _plan()
    packed = layout.to_bytes()
    ends = [0, PAGE_BYTES]
    places = [(offset, offset + PAGE_BYTES) for offset in SECTOR_OFFSETS]
    places.append((made.layout_offset, made.layout_offset + len(packed)))
    for slot in range(made.slots):
        places.append((made.slot_offset(slot), made.seal_offset(slot)))
        places.append((made.seal_offset(slot), made.seal_offset(slot) + made.seal_room_bytes))
        assert made.seal_offset(slot) - made.slot_offset(slot) == area_bytes(layout, 1)
    for begin, end in places:
        assert begin >= ends[-1]
        ends.append(end)
        assert begin % PAGE_BYTES == 0
    assert ends[-1] == made.file_bytes


def test_slots_of_many_bytes_begin_on_huge_pages() -> None:
    made = Superblock.plan(laid_out([40 << 20]), 0, run="kelp", run_digest=_DIGEST, slots=2)
    assert {made.slot_offset(slot) % (2 << 20) for slot in range(2)} == {0}


@given(at=st.integers(0, PAGE_BYTES - 1), flip=st.integers(1, 255))
def test_any_flipped_byte_of_a_superblock_is_seen(at: int, flip: int) -> None:
    page = bytearray(_plan().to_bytes())
    page[at] ^= flip
    with pytest.raises(HoldfastError):
        Superblock.from_bytes(bytes(page), source="here")


def test_another_version_is_said_to_be_one() -> None:
    page = bytearray(_plan().to_bytes())
    page[8] = 9
    with pytest.raises(ProtocolError, match="version 9, this holdfast reads 1"):
        Superblock.from_bytes(bytes(page), source="here")


@pytest.mark.parametrize(
    "change",
    [
        {"slots": SLOTS_MAX + 1},
        {"slots": 0},
        {"rank": 7},
        {"slot_bytes": 4096},
        {"slot_bytes": 5000},
        {"slots_offset": 8192},
        {"slot_bytes": 2**63 - 4096},
        {"layout_offset": 4096},
        {"layout_bytes": 2**40},
    ],
)
def test_a_superblock_that_contradicts_itself_is_damage(change: dict[str, int]) -> None:
    page = dataclasses.replace(_plan(), **change).to_bytes()  # type: ignore[arg-type]
    with pytest.raises(DamageError, match="contradicts"):
        Superblock.from_bytes(page, source="here")


def _sector(sequence: int) -> CommitSector:
    return CommitSector(
        sequence, (Commitment(2, 7, True, 900, 0xFFFFFFFF), None, Commitment(1, 2**61, False, 1, 0))
    )


def test_a_sector_is_read_as_it_was_written() -> None:
    page = _sector(2**60).to_bytes()
    assert len(page) == PAGE_BYTES
    assert CommitSector.from_bytes(page, 3) == _sector(2**60)
    assert CommitSector.from_bytes(page, 2) is None


@given(at=st.integers(0, PAGE_BYTES - 1), flip=st.integers(1, 255))
def test_any_flipped_byte_of_a_sector_is_seen(at: int, flip: int) -> None:
    page = bytearray(_sector(4).to_bytes())
    page[at] ^= flip
    assert CommitSector.from_bytes(bytes(page), 3) is None


@given(torn=st.integers(1, 7))
def test_a_torn_sector_is_none(torn: int) -> None:
    old, new = _sector(4).to_bytes(), CommitSector(6, (None, None, None)).to_bytes()
    assert CommitSector.from_bytes(new[: torn * 512] + old[torn * 512 :], 3) is None


def test_the_most_slots_have_room() -> None:
    full = CommitSector(1, (Commitment(1, 1, True, 2**32 - 1, 2**32 - 1),) * SLOTS_MAX)
    assert CommitSector.from_bytes(full.to_bytes(), SLOTS_MAX) == full


def _current(*sectors: CommitSector | None) -> tuple[int, CommitSector]:
    pages = {
        at: b"" if one is None else one.to_bytes() for at, one in zip(SECTOR_OFFSETS, sectors, strict=True)
    }
    return newest_sector(lambda offset, _: pages[offset], _plan(), source="a.slots")


def test_the_higher_sequence_counts() -> None:
    assert _current(_sector(4), _sector(5)) == (1, _sector(5))
    assert _current(_sector(4), None) == (0, _sector(4))
    with pytest.raises(DamageError, match=r"a\.slots: neither commit sector is whole"):
        _current(None, None)
    assert CommitSector.from_bytes(bytes(PAGE_BYTES), 3) is None
