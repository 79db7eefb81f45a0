"""Writes one slice into one tier, timed, and counts every byte that reaches the medium; no MPI, gate or stager.

    a slice in memory ─► begin ─► p threads: CRC, write ─► seal ─► complete
                                   └ where slots are memory: a copy straight into the slot (strategy D)

Only the tier is measured here; other experiments measure the cost of a checkpoint to a training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.workload import Workload
from holdfast.crc import crc32
from holdfast.image.layout import Layout
from holdfast.image.slices import frames_of
from holdfast.wire.state_messages import Agreement
from trainer_side.state.skeleton import plan
from trainer_side.state.tree import classify, collect
from trainer_side.tiers.first_touch import huge_buffer
from trainer_side.tiers.medium import Copy, Medium, address_of
from trainer_side.tiers.tier import SliceWriter, Tier

__all__ = ["Counting", "Slice", "layout_of"]

_PICKLE_BYTES = 16 << 20


def layout_of(model: str, *, ranks: int, chunk_bytes: int) -> Layout:
    """Return the layout of a model's checkpoint."""
    state = Workload(model).state()
    tree = collect(state)
    skeleton = plan(
        tree,
        classify(state, tree),
        rank=0,
        ranks=ranks,
        chunk_bytes=chunk_bytes,
        agreed=Agreement(_PICKLE_BYTES, {}),
    )
    return skeleton.layout


class Slice:
    """The last rank's slice, of random bytes; not rank 0's, which also holds the plain values."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.rank = layout, layout.ranks - 1
        self.frames = frames_of(layout, self.rank)
        self.nbytes = layout.slice_bytes(self.rank)
        last = self.frames[-1]
        memory = huge_buffer(last.offset + last.padded_bytes)
        memory.random_(0, 256)
        self._keep, self.view = memory, memory.numpy().data
        self._step = 0

    def write(self, tier: Tier, threads: int) -> float:
        """Write the slice into `tier` as a new step; return the seconds until it is sealed."""
        self._step += 1
        begun = time.monotonic()
        writer = tier.begin(1, self._step)
        assert writer is not None, "one slice at a time: there is a slot"
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda frame: self._write(writer, frame), range(len(self.frames))))
        assert writer.seal({})
        seconds = time.monotonic() - begun
        tier.complete(1, self._step)
        return seconds

    def _write(self, writer: SliceWriter, number: int) -> None:
        frame = self.frames[number]
        view = self.view[frame.offset : frame.offset + frame.padded_bytes]
        memory = writer.memory
        if memory is not None:
            copy: Callable[[int, int, int], Any] | None = getattr(writer, "copy", None)
            assert copy is not None
            place = memory[frame.offset : frame.offset + frame.padded_bytes]
            copy(address_of(place), address_of(view), frame.padded_bytes)
            view = place
        writer.write(number, view, crc32(view[: frame.nbytes]))


class Counting:
    """A `Medium` that counts the bytes written to it, through `write` or straight into its memory.

    Attributes:
        nbytes: Bytes written so far; the caller may reset it.
    """

    def __init__(self, medium: Medium) -> None:
        self._medium, self._lock = medium, threading.Lock()
        self.nbytes = 0

    @property
    def write_mode(self) -> str:
        return self._medium.write_mode

    @property
    def copy(self) -> Copy | None:
        copy = self._medium.copy
        if copy is None:
            return None

        def counted(to: int, source: int, nbytes: int) -> object:
            self._count(nbytes)
            return copy(to, source, nbytes)

        return counted

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        return self._medium.memory(offset, nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        """Count bytes that are not in the medium's memory yet: `copy` has counted the others."""
        memory = self._medium.memory(offset, view.nbytes)
        if memory is None or address_of(memory) != address_of(view):
            self._count(view.nbytes)
        self._medium.write(offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._medium.read(offset, nbytes)

    def flush(self) -> None:
        self._medium.flush()

    def close(self) -> None:
        self._medium.close()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
