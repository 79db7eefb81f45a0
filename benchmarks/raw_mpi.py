"""Bare MPI: sends the bytes of one image from as many ranks to one receiver, in messages of a chunk.

    mpirun -n 2 python -m benchmarks.raw_mpi sender … : -n 1 python -m benchmarks.raw_mpi receiver …

    transfer   touched memory ─► MPI ─► touched memory
    pipeline   tensors ─ copy ─► touched memory ─► MPI ─► touched memory ─ O_DIRECT, two threads ─► the file of the call
                                                                                              before, synced

The pipeline takes a checkpoint's bytes the whole way with nothing else: the time that copy, transfer and write need
together on these cores. No protocol, no credits, no CRCs: huge pages on both sides, receives posted before the sends,
completion polled with short sleeps as all processes share the cores.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.hub import Link
from benchmarks.raw_direct import direct_file, whole_pages
from holdfast.ring.pages import aligned_buffer

__all__ = ["main"]

_TAG = 1
_POLL_SECONDS = 0.00005
_WRITERS = 2
_TENSOR_BYTES_MAX = 512 << 20  # far more than a cache holds

_Under = dict[int, tuple[int, Any]]  # in flight, by slot: chunk and request


class _Memory:
    """Slots of one chunk each, in shared memory and touched: a first touch of fresh pages is many times slower."""

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        import numpy as np

        self.slots, self._chunk_bytes = slots, chunk_bytes
        self.array = np.frombuffer(aligned_buffer(max(1, slots) * chunk_bytes), np.uint8)
        self.array[:] = 1

    def part(self, slot: int, nbytes: int) -> Any:
        """Return the first `nbytes` of a slot."""
        return self.array[slot * self._chunk_bytes : slot * self._chunk_bytes + nbytes]

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return int(self.array.ctypes.data) + slot * self._chunk_bytes


class _Image:
    """The image's chunks by sender."""

    def __init__(self, nbytes: int, chunk_bytes: int, senders: int) -> None:
        self.nbytes, self.chunk_bytes = nbytes, chunk_bytes
        self.chunks = -(-nbytes // chunk_bytes)
        self.slices = [
            range(rank * self.chunks // senders, (rank + 1) * self.chunks // senders)
            for rank in range(senders)
        ]

    def length(self, chunk: int) -> int:
        return min(self.chunk_bytes, self.nbytes - chunk * self.chunk_bytes)

    def in_turn(self) -> list[tuple[int, int]]:
        """List (sender, chunk) round robin, so that every sender finds posted receives."""
        return [
            (rank, chunk)
            for turn in range(max(map(len, self.slices)))
            for rank, own in enumerate(self.slices)
            for chunk in own[turn : turn + 1]
        ]


def _exchange(
    order: list[tuple[int, int]],
    slots: int,
    post: Callable[[int, int, int], Any],
    arrived: Callable[[int, int], bool] = lambda _slot, _chunk: True,
    freed: Callable[[], list[int]] = list,
) -> None:
    """Post each (peer, chunk) of `order` as slots become free, until all are complete.

    Args:
        order: The chunks to send or receive.
        slots: Most requests in flight.
        post: Takes (slot, peer, chunk), returns the request.
        arrived: Called with (slot, chunk) on completion; returns whether the slot is free again.
        freed: Returns the slots freed since, of those that `arrived` kept.
    """
    free = list(range(slots))
    under_way: _Under = {}
    order = order[:]
    while order or under_way:
        free += freed()
        while order and free:
            peer, chunk = order.pop(0)
            slot = free.pop()
            under_way[slot] = chunk, post(slot, peer, chunk)
        done = [slot for slot, (_, request) in under_way.items() if request.Test()]
        free += [slot for slot in done if arrived(slot, under_way.pop(slot)[0])]
        if not done:
            time.sleep(_POLL_SECONDS)


def _send(world: Any, image: _Image, memory: _Memory, tensors: _Memory | None) -> None:
    """Send this rank's chunks; with `tensors`, copy each from there first."""
    receiver = world.Get_size() - 1

    def post(slot: int, peer: int, chunk: int) -> Any:
        nbytes = image.length(chunk)
        if tensors is not None:
            ctypes.memmove(memory.address(slot), tensors.address(chunk % tensors.slots), nbytes)
        return world.Isend(memory.part(slot, nbytes), peer, _TAG)

    _exchange([(receiver, chunk) for chunk in image.slices[world.Get_rank()]], memory.slots, post)


def _receive(world: Any, image: _Image, memory: _Memory, path: Path | None) -> float:
    """Receive all chunks; with `path`, write each there as it arrives. Return the time of the last arrival."""

    def post(slot: int, peer: int, chunk: int) -> Any:
        return world.Irecv(memory.part(slot, image.length(chunk)), peer, _TAG)

    if path is None:
        _exchange(image.in_turn(), memory.slots, post)
        return time.monotonic()
    writing: dict[int, Future[int]] = {}
    with ThreadPoolExecutor(_WRITERS) as pool, direct_file(path, image.nbytes, truncate=False) as fd:

        def arrived(slot: int, chunk: int) -> bool:
            data = memory.part(slot, whole_pages(image.length(chunk)))
            writing[slot] = pool.submit(os.pwrite, fd, data, chunk * image.chunk_bytes)
            return False

        def freed() -> list[int]:
            written = [slot for slot, future in writing.items() if future.done()]
            for slot in written:
                assert writing.pop(slot).result() > 0
            return written

        _exchange(image.in_turn(), memory.slots, post, arrived, freed)
        staged = time.monotonic()
        for future in writing.values():
            future.result()
    return staged


def main() -> None:
    """Run one rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["sender", "receiver"])
    parser.add_argument("--hub", type=Path, required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--chunk-bytes", type=int, required=True)
    parser.add_argument("--ring-chunks", type=int, required=True)
    arguments = parser.parse_args()

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    image = _Image(arguments.nbytes, arguments.chunk_bytes, world.Get_size() - 1)
    receiving = arguments.role == "receiver"
    slots = min(image.chunks, arguments.ring_chunks) if receiving else len(image.slices[rank])
    memory = _Memory(slots, image.chunk_bytes)
    tensors: _Memory | None = None
    written: Path | None = None

    link = Link(arguments.hub, job="raw_mpi", rank=rank)
    for order in link.orders():
        path = Path(order["file"]) if order["do"] == "pipeline" else None
        if path is not None and not receiving and tensors is None:
            tensors = _Memory(max(1, min(slots, _TENSOR_BYTES_MAX // image.chunk_bytes)), image.chunk_bytes)
        world.Barrier()
        begin = time.monotonic()
        if receiving:
            staged = _receive(world, image, memory, path)
        else:
            _send(world, image, memory, tensors if path is not None else None)
            staged = time.monotonic()
        link.answer({"start": begin, "staged": staged, "end": time.monotonic()})
        written = path or written
    if receiving and written is not None:
        written.unlink(missing_ok=True)
    link.close()


if __name__ == "__main__":
    main()
