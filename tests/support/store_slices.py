"""Slices of made-up images, written to a store by the tier itself."""

from __future__ import annotations

import mmap
import random
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from holdfast.image.slices import frames_of
from holdfast.store.base import Store
from tests.support.images import Image
from trainer_side.tiers.store_tier import StoreTier
from trainer_side.tiers.store_writer import StoreSliceWriter

RUN = "run"


def tier_of(store: Store, image: Image, rank: int, *, slots: int = 2) -> StoreTier:
    """The tier of one rank, prepared for the layout of `image`."""
    tier = StoreTier(store, run=RUN, rank=rank, slots=slots)
    tier.prepare(image.layout, rank)
    return tier


def frame_buffer(image: Image, rank: int, number: int) -> memoryview:
    """One frame as a rank hands it over: page-aligned, padded with what must not matter."""
    frame = frames_of(image.layout, rank)[number]
    buffer = memoryview(mmap.mmap(-1, frame.padded_bytes))
    buffer[: frame.nbytes] = image.frame(frame.chunk, rank)
    buffer[frame.nbytes :] = b"\xaa" * (frame.padded_bytes - frame.nbytes)
    return buffer


def write_frames(
    writer: StoreSliceWriter, image: Image, rank: int, *, seed: int = 0, threads: int = 3
) -> None:
    """All frames of a slice, in a wild order, from several threads."""
    frames = frames_of(image.layout, rank)
    numbers = list(range(len(frames)))
    random.Random(seed).shuffle(numbers)

    def write(number: int) -> None:
        buffer = frame_buffer(image, rank, number)
        writer.write(number, buffer, zlib.crc32(buffer[: frames[number].nbytes]))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, numbers))


def write_slices(
    store: Store, image: Image, *, attempt: int, step: int, ranks: Iterable[int] | None = None
) -> list[StoreTier]:
    """Seal the slices of these ranks (all of them); gives their tiers. Nobody is told that the step is complete."""
    tiers = []
    for rank in range(image.layout.ranks) if ranks is None else ranks:
        tier = tier_of(store, image, rank, slots=8)
        writer = tier.begin(attempt, step)
        assert writer is not None
        write_frames(writer, image, rank, seed=step)
        assert writer.seal({"saved_at_unix": 1_700_000_000.0})
        tiers.append(tier)
    return tiers
