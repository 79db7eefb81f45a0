"""Several ranks in one process: councils whose messages go through lists, and an image with a slice for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import Layout
from holdfast.image.slices import area_bytes, frames_of

__all__ = ["Area", "Net", "laid_out", "until"]

SECONDS_MAX = 60.0


def laid_out(ranks: int, *, chunks: int = 6, chunk_bytes: int = 4096) -> Layout:
    """Chunks of one replicated entry."""
    nbytes = chunks * chunk_bytes - 100
    return Layout(nbytes + 100, chunk_bytes, ranks, (Entry("a", 64, nbytes - 64, REPLICATED, ()),))


def until(condition: Callable[[], object]) -> None:
    """Look again and again; a failure of the test at the limit."""
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


class Net:
    """Simulates MPI for the councils. `cut`: messages of that rank are lost. `dead`: MPI also reports the rank lost."""

    def __init__(self, ranks: int) -> None:
        self.inboxes: list[list[tuple[int, bytes]]] = [[] for _ in range(ranks)]
        self.cut: set[int] = set()
        self.dead: set[int] = set()
        self.polls = [0] * ranks
        self.lock = threading.Lock()

    def port(self, rank: int) -> _Port:
        return _Port(self, rank)


class _Port:
    def __init__(self, net: Net, rank: int) -> None:
        self._net, self._rank = net, rank
        self.rank, self.ranks = rank, len(net.inboxes)

    def send(self, rank: int, message: bytes) -> None:
        with self._net.lock:
            if not {rank, self._rank} & (self._net.cut | self._net.dead):
                self._net.inboxes[rank].append((self._rank, message))

    def poll(self) -> list[tuple[int, bytes]]:
        with self._net.lock:
            self._net.polls[self._rank] += 1
            found, self._net.inboxes[self._rank] = self._net.inboxes[self._rank], []
        return found

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(self._net.dead - {self._rank})

    def flush(self, seconds_max: float) -> None:
        return


class Area:
    """A slice source whose bytes identify their step; the test makes frames ready."""

    def __init__(self, layout: Layout, rank: int, memory: memoryview | None = None) -> None:
        self.frames = frames_of(layout, rank)
        self.memory = memory if memory is not None else memoryview(_aligned(area_bytes(layout, rank)))
        self.ready: set[int] = set()
        self.views = 0

    def fill(self, value: int, *, frames: int | None = None) -> None:
        for frame in self.frames[:frames]:
            self.memory[frame.offset : frame.offset + frame.nbytes] = bytes([value % 256]) * frame.nbytes
            self.ready.add(frame.offset)

    def view(self, offset: int, nbytes: int) -> memoryview:
        self.views += 1
        return self.memory[offset : offset + nbytes]

    def is_ready(self, offset: int) -> bool:
        return offset in self.ready

    def is_complete(self) -> bool:
        return len(self.ready) == len(self.frames)


def _aligned(nbytes: int) -> memoryview:
    import mmap

    return memoryview(mmap.mmap(-1, nbytes))
