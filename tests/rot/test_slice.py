"""A flip of any byte of a slice, of its seal, or of its layout in the store: no file comes of it, and it is named."""

from __future__ import annotations

import random
import zlib

import pytest

from holdfast.checkpoints.assembly import assemble
from holdfast.checkpoints.slice_sets import SliceName, find_sets, layout_name, load_set
from holdfast.errors import DamageError
from holdfast.image.slices import frames_of
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore
from tests.support.store_slices import write_slices

FLIPS = 1000
IMAGE = made_up(4, entries=6, chunk_bytes=4096, ranks=2, entry_bytes_max=3000)


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    store = MemoryStore()
    write_slices(store, IMAGE, attempt=1, step=7)
    return store.objects


def outcome(whole: dict[str, bytes], name: str, at: int, bit: int) -> str | None:
    """What is said when this bit is flipped; None if the file comes out as it must."""
    store = MemoryStore()
    store.objects = dict(whole)
    data = bytearray(whole[name])
    data[at] ^= 1 << bit
    store.objects[name] = bytes(data)
    (found,) = find_sets(store.list())
    try:
        manifest = assemble(store, load_set(store, found), attempt=9, check=lambda: None)
    except DamageError as error:
        assert not [name for name in store.objects if name.startswith("step-")]
        assert store.open_uploads == []
        return str(error)
    assert store.objects[manifest.file] == IMAGE.final, "a file that is not as it was saved"
    return None


def test_a_flip_in_a_slice_is_named(whole: dict[str, bytes]) -> None:
    chance = random.Random(1)
    for _ in range(FLIPS):
        rank = chance.randrange(IMAGE.layout.ranks)
        frame = chance.choice(frames_of(IMAGE.layout, rank))
        name = SliceName(1, 7, rank, IMAGE.layout.ranks).slice
        said = outcome(whole, name, frame.offset + chance.randrange(frame.nbytes), chance.randrange(8))
        assert said is not None
        assert name in said
        assert f"chunk {frame.chunk} " in said


def test_the_padding_behind_a_frame_means_nothing(whole: dict[str, bytes]) -> None:
    padded = [
        (rank, frame.offset + frame.nbytes)
        for rank in range(IMAGE.layout.ranks)
        for frame in frames_of(IMAGE.layout, rank)
        if frame.padded_bytes > frame.nbytes
    ]
    assert padded
    for rank, at in padded:
        assert outcome(whole, SliceName(1, 7, rank, IMAGE.layout.ranks).slice, at, 3) is None


def test_a_flip_in_a_seal_is_named(whole: dict[str, bytes]) -> None:
    chance = random.Random(2)
    for _ in range(FLIPS):
        name = SliceName(1, 7, chance.randrange(IMAGE.layout.ranks), IMAGE.layout.ranks).seal
        said = outcome(whole, name, chance.randrange(len(whole[name])), chance.randrange(8))
        assert said is not None
        assert name in said


def test_a_flip_in_a_stored_layout_is_named_or_unpacks_to_the_same(whole: dict[str, bytes]) -> None:
    """What may flip unseen are bits of the packing that unpack to the same: its level, what fills its last byte."""
    chance, unseen = random.Random(3), 0
    name = layout_name(1, IMAGE.layout.digest)
    for _ in range(FLIPS):
        at, bit = chance.randrange(len(whole[name])), chance.randrange(8)
        said = outcome(whole, name, at, bit)
        if said is None:
            data = bytearray(whole[name])
            data[at] ^= 1 << bit
            assert zlib.decompress(data) == zlib.decompress(whole[name])
            unseen += 1
        else:
            assert name in said
    assert unseen < FLIPS / 50
