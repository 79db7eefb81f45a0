"""Assembles a file in one process without threads, with the steps of trainers, stager and flusher."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.crc import crc32
from holdfast.image.layout import Layout
from holdfast.wire.state_messages import Agreement
from trainer_side.state.position_names import PerRankNames, SavedNames
from trainer_side.state.skeleton import Capture, Skeleton, capture, plan
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify, collect

CHUNK_BYTES = 4096


def make_plan(
    state: Mapping[str, Any],
    *,
    rank: int = 0,
    ranks: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    reserve: int = 0,
    trailer: bytes = b"",
) -> Skeleton:
    """Return the plan of one rank, with the reserves of a job of this rank alone."""
    tree = collect(state)
    proposed = table(state, tree, rank=rank, ranks=ranks, trailer_bytes=len(trailer))
    return plan(
        tree,
        classify(state, tree),
        rank=rank,
        ranks=ranks,
        chunk_bytes=chunk_bytes,
        agreed=Agreement(reserve or 2 * proposed.pickle_bytes + 4096, proposed.per_rank_bytes),
        trailer=trailer,
    )


def named(state: Mapping[str, Any]) -> bytes:
    """Return the names that rank 0 appends to the pickle."""
    names = SavedNames(state, is_writer=True)
    with names.record_param_groups() as given:
        tree = collect(state)
    names.rebuild(tree, given)
    PerRankNames(state).refresh(tree, is_new=True)
    return names.trailer


def taken(state: Mapping[str, Any], skeleton: Skeleton, trailer: bytes = b"") -> Capture:
    found = capture(collect(state), skeleton, trailer=trailer)
    assert found is not None
    return found


def sent(skeleton: Skeleton, captured: Capture) -> dict[int, bytes]:
    """Return the bytes that one rank sends, by image offset, with CRC fields still zero."""
    layout, rank = skeleton.layout, skeleton.rank
    frames: dict[int, bytes] = {}
    for chunk, extents in layout.sent_frames(rank):
        for extent in extents:
            memory = bytearray(extent.nbytes)
            skeleton.write_literals(extent, memoryview(memory))
            for segment in layout.segments(chunk):
                if segment.entry is not None and extent.offset <= segment.offset < extent.end:
                    first = segment.offset - layout.entries[segment.entry].offset
                    data = _content(captured, segment.entry)[first : first + segment.nbytes]
                    start = segment.offset - extent.offset
                    assert len(data) == segment.nbytes
                    memory[start : start + segment.nbytes] = data
            assert len(memory) == extent.nbytes
            frames[extent.offset] = bytes(memory)
    return frames


def _content(captured: Capture, entry: int) -> bytes:
    if entry in captured.contents:
        return captured.contents[entry]
    source = captured.sources[entry]
    assert source is not None
    assert source.entry == entry
    copied = bytes(source.bytes().cpu().numpy())
    assert source.device.type != "cpu" or copied == ctypes.string_at(source.data_ptr, source.nbytes)
    return copied


def assembled(layout: Layout, frames: Sequence[Mapping[int, bytes]]) -> bytes:
    """Return the file from all ranks' bytes, with correct CRCs."""
    image = bytearray(layout.image_bytes)
    covered = 0
    for rank_frames in frames:
        for offset, data in rank_frames.items():
            image[offset : offset + len(data)] = data
            covered += len(data)
    assert covered == layout.image_bytes
    for entry in layout.entries:
        crc = crc32(bytes(image[entry.offset : entry.end]))
        for crc_field in entry.crc_fields:
            assert image[crc_field : crc_field + 4] == bytes(4)
            image[crc_field : crc_field + 4] = crc.to_bytes(4, "little")
    return bytes(image)


def save(state: Mapping[str, Any], path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> Layout:
    """Write the file of a job with one rank."""
    trailer = named(state)
    skeleton = make_plan(state, chunk_bytes=chunk_bytes, trailer=trailer)
    path.write_bytes(assembled(skeleton.layout, [sent(skeleton, taken(state, skeleton, trailer))]))
    return skeleton.layout
