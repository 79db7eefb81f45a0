"""Frames in any order become the parts of their slice, each sent once and whole."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.image.slices import SliceFrame
from trainer_side.tiers.store_writer import PartCutter

PAGE = 4096


def slice_of(sizes: list[int]) -> tuple[list[SliceFrame], bytes]:
    frames, offset = [], 0
    for chunk, nbytes in enumerate(sizes):
        frames.append(SliceFrame(chunk, (), offset, nbytes))
        offset += frames[-1].padded_bytes
    return frames, random.Random(len(sizes)).randbytes(offset)


@given(
    st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_parts_are_the_slice_cut_up_whatever_the_order(sizes: list[int], pages: int, seed: int) -> None:
    frames, whole = slice_of(sizes)
    part_bytes, sent = pages * PAGE, {}

    def send(part: int, view: memoryview, crc: int) -> None:
        assert part not in sent, "sent twice"
        sent[part] = bytes(view)
        assert zlib.crc32(view) == crc

    cutter = PartCutter(frames, part_bytes, send)
    order = list(range(len(frames)))
    random.Random(seed).shuffle(order)
    for number in order:
        frame = frames[number]
        buffer = bytearray(whole[frame.offset : frame.offset + frame.padded_bytes])
        cutter.put(number, memoryview(buffer))
        buffer[:] = bytes(len(buffer))  # it is the caller's again
    assert [sent[part] for part in sorted(sent)] == [
        whole[at : at + part_bytes] for at in range(0, len(whole), part_bytes)
    ]
    assert not cutter._joined, "memory is kept"


def test_threads_may_share_one_part() -> None:
    frames, whole = slice_of([PAGE] * 64)
    sent = []
    cutter = PartCutter(frames, 64 * PAGE, lambda part, view, crc: sent.append(bytes(view)))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cutter.put(n, memoryview(whole)[n * PAGE : (n + 1) * PAGE]), range(64)))
    assert sent == [whole]


def test_an_error_of_the_store_is_raised() -> None:
    frames, whole = slice_of([PAGE])

    def send(part: int, view: memoryview, crc: int) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        PartCutter(frames, PAGE, send).put(0, memoryview(whole))
