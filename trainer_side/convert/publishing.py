"""A tree as the image of a checkpoint of one rank, whose chunks are made on request.

    tree ─► skeleton: layout, literals      each chunk: literals, pickle, bytes of tensors from where they lie

Tensors may lie in a mapped file, or in files that are read for each chunk. Memory then holds only the publisher's parts
and the page cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.image.entries import Extent
from holdfast.image.layout import CHUNK_BYTES, Layout
from holdfast.wire.state_messages import Agreement
from trainer_side.convert.contents import bytes_of
from trainer_side.convert.dcp_parts import StoredTensor
from trainer_side.state.skeleton import Skeleton, capture, plan
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify

_RANK = 0  # the only rank


def plan_state(tree: Mapping[str, Any], trailer: bytes) -> Skeleton:
    """Lay out a state that one rank holds; `trailer`: see `capture`. StateError: something in it cannot be saved."""
    proposed = table(tree, tree, rank=_RANK, ranks=1, trailer_bytes=len(trailer))
    return plan(
        tree,
        classify(tree, tree),
        rank=_RANK,
        ranks=1,
        chunk_bytes=CHUNK_BYTES,
        agreed=Agreement(proposed.pickle_bytes, {}),
        trailer=trailer,
    )


class StateImage:
    """The image of a tree whose tensors must not change: a `holdfast.checkpoints.image_publishing.Image`.
    `stored`: sources of the bytes of tensors that are not in memory.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        skeleton: Skeleton,
        stored: Sequence[StoredTensor],
        trailer: bytes,
    ) -> None:
        captured = capture(tree, skeleton, trailer=trailer)
        assert captured is not None, "the plan is of this tree"
        self._tree, self._skeleton, self._captured = tree, skeleton, captured
        self._stored = {one.tensor.data_ptr(): one for one in stored}

    @property
    def layout(self) -> Layout:
        return self._skeleton.layout

    def write_chunk(self, chunk: int, memory: memoryview) -> None:
        extent = self.layout.chunk_extent(chunk)
        self._skeleton.write_literals(extent, memory)
        for segment in self.layout.segments(chunk):
            if segment.entry is not None:
                begin = segment.offset - extent.offset
                entry_offset = segment.offset - self.layout.entries[segment.entry].offset
                self._write(
                    segment.entry,
                    Extent(entry_offset, segment.nbytes),
                    memory[begin : begin + segment.nbytes],
                )

    def _write(self, entry: int, part: Extent, out: memoryview) -> None:
        content = self._captured.contents.get(entry)
        if content is not None:
            out[:] = content[part.offset : part.end]
            return
        source = self._captured.sources[entry]
        assert source is not None, "one rank has every storage"
        stored = self._stored.get(source.data_ptr)
        if stored is not None:
            stored.read(part.offset, out)
            return
        out[:] = bytes_of(source.data_ptr + part.offset, part.nbytes)
