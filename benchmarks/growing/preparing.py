"""CPU time of the session before a checkpoint's first byte, with many ranks and chunks, replicated or split."""

from __future__ import annotations

import time

from holdfast.image.entries import REPLICATED, SPLIT, Entry
from holdfast.image.layout import Layout
from holdfast.image.regions import Region, unite
from stager.session.checkpoint import Checkpoint

__all__ = ["prepare"]

_CHUNK_BYTES = 4096
_TENSORS = 100


def prepare(ranks: int, chunks: int) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of `Checkpoint.prepare` for the first checkpoint of a layout, and for the next one."""
    nbytes = chunks * _CHUNK_BYTES
    whole = Layout(nbytes, _CHUNK_BYTES, ranks, (Entry("a", 64, nbytes - _CHUNK_BYTES, REPLICATED, ()),))
    layouts = {"replicated": whole, "split": _split(ranks, nbytes)}
    return {name: _seconds(layout) for name, layout in layouts.items()}


def _split(ranks: int, nbytes: int) -> Layout:
    shard = (nbytes - _CHUNK_BYTES) // _TENSORS // ranks
    pattern = unite((ranks, shard), 1, [Region((rank, 0), (1, shard)) for rank in range(ranks)])
    entries = tuple(
        Entry(f"t{number}", number * pattern.nbytes, pattern.nbytes, SPLIT, ()) for number in range(_TENSORS)
    )
    return Layout(nbytes, _CHUNK_BYTES, ranks, entries, patterns=(pattern,))


def _seconds(layout: Layout) -> dict[str, float]:
    found = []
    for step in (1, 2):
        checkpoint = Checkpoint(step, layout.ranks, 0.0, 0.0)
        begun = time.thread_time()
        checkpoint.prepare(layout, range(layout.chunks), 0.0)
        found.append(time.thread_time() - begun)
    return {"first_seconds": found[0], "next_seconds": found[1]}
