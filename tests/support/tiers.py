"""Slices for tests of tiers: synthetic images, writing a slice frame by frame, and comparing a tier with them."""

from __future__ import annotations

import mmap
import random

from holdfast.crc import crc32
from holdfast.image.layout import Layout
from holdfast.image.slices import frames_of
from tests.support.images import Image, made_up
from trainer_side.tiers.tier import SealedSlice, SliceWriter, Tier

__all__ = ["RANKS", "RUN", "aligned", "check", "image", "put", "read", "save", "slice_of", "write"]

RUN = "/mnt/store/kelp"
RANKS = 2


def image(seed: int = 7, *, ranks: int = RANKS) -> Image:
    return made_up(seed, entries=12, chunk_bytes=8192, ranks=ranks, entry_bytes_max=20_000)


def aligned(data: bytes, nbytes: int) -> memoryview:
    memory = mmap.mmap(-1, max(4096, nbytes))
    memory[: len(data)] = data
    return memoryview(memory)[:nbytes]


def slice_of(made: Image, rank: int, seed: int = 0) -> list[bytes]:
    """The frames of a rank; another seed gives other bytes."""
    chance = random.Random(seed)
    return [
        chance.randbytes(frame.nbytes) if seed else made.frame(frame.chunk, rank)
        for frame in frames_of(made.layout, rank)
    ]


def put(writer: SliceWriter, layout: Layout, rank: int, number: int, data: bytes) -> None:
    frame = frames_of(layout, rank)[number]
    if writer.memory is not None:
        writer.memory[frame.offset : frame.offset + frame.nbytes] = data
        buffer = writer.memory[frame.offset : frame.offset + frame.padded_bytes]
    else:
        buffer = aligned(data, frame.padded_bytes)
    writer.write(number, buffer, crc32(data))


def write(tier: Tier, made: Image, rank: int, attempt: int, step: int) -> SliceWriter:
    writer = tier.begin(attempt, step)
    assert writer is not None, f"no slot for {attempt}, {step}"
    for number, data in enumerate(slice_of(made, rank, attempt * 1000 + step)):
        put(writer, made.layout, rank, number, data)
    return writer


def save(tier: Tier, made: Image, rank: int, attempt: int, step: int, *, complete: bool = True) -> None:
    assert write(tier, made, rank, attempt, step).seal({"saved_at_unix": 1.5})
    if complete:
        tier.complete(attempt, step)


def read(tier: Tier, kept: SealedSlice) -> list[bytes]:
    """Read the frames of a slice and compare their CRCs."""
    found = []
    for frame, crc in zip(frames_of(kept.layout, kept.seal.rank), kept.seal.frame_crc32s, strict=True):
        view = aligned(b"", frame.nbytes)
        tier.read_into(kept, frame.offset, view)
        assert crc32(view) == crc
        found.append(bytes(view))
    return found


def check(tier: Tier, made: Image, *orders: tuple[int, int], rank: int = 0) -> None:
    """Check that the tier holds exactly these slices of this rank, newest first, with all of their bytes."""
    mine = [kept for kept in tier.kept_slices() if kept.seal.rank == rank]
    assert [kept.seal.order for kept in mine] == list(orders)
    for kept in mine:
        assert kept.layout == made.layout
        attempt, step = kept.seal.order
        assert read(tier, kept) == slice_of(made, rank, attempt * 1000 + step)
