"""What MPI can do: the bytes of one image from as many ranks to one receiver, in messages of a chunk.

    mpirun -n 2 python -m benchmarks.raw_mpi sender … : -n 1 python -m benchmarks.raw_mpi receiver …

No protocol, no credits, no CRCs: touched memory on both sides (shared memory at the receiver, as the ring
is), receives posted before anything is sent, completion polled with short sleeps as all processes share the
cores.
"""

from __future__ import annotations

import argparse
import mmap
import time
from pathlib import Path

from benchmarks.hub import Link

__all__ = ["main"]

_TAG = 1
_POLL_SECONDS = 0.00005


def main() -> None:
    """Entry point of every rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["sender", "receiver"])
    parser.add_argument("--hub", type=Path, required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--chunk-bytes", type=int, required=True)
    parser.add_argument("--ring-chunks", type=int, required=True)
    arguments = parser.parse_args()

    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    senders = world.Get_size() - 1
    rank = world.Get_rank()
    chunk_bytes: int = arguments.chunk_bytes
    chunks = -(-arguments.nbytes // chunk_bytes)
    slices = [range(r * chunks // senders, (r + 1) * chunks // senders) for r in range(senders)]

    def length(chunk: int) -> int:
        return int(min(chunk_bytes, arguments.nbytes - chunk * chunk_bytes))

    receiving = arguments.role == "receiver"
    slots = min(chunks, arguments.ring_chunks) if receiving else len(slices[rank])
    memory = mmap.mmap(-1, max(1, slots) * chunk_bytes)  # MAP_SHARED | MAP_ANONYMOUS: shared memory
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1 + rank  # touched: the first touch of fresh pages is many times slower than the second

    def transfer() -> tuple[float, float]:
        begin = time.monotonic()
        if receiving:
            # Round robin over the senders, so that all of them have receives waiting.
            order = [
                (r, c)
                for turn in range(max(map(len, slices)))
                for r in range(senders)
                for c in slices[r][turn : turn + 1]
            ]
        else:
            order = [(senders, chunk) for chunk in slices[rank]]
        free = list(range(slots))
        under_way: dict[int, MPI.Request] = {}
        while order or under_way:
            while order and free:
                peer, chunk = order.pop(0)
                slot = free.pop()
                part = array[slot * chunk_bytes : slot * chunk_bytes + length(chunk)]
                post = world.Irecv if receiving else world.Isend
                under_way[slot] = post(part, peer, _TAG)
            done = [slot for slot, request in under_way.items() if request.Test()]
            for slot in done:
                del under_way[slot]
            free += done
            if not done:
                time.sleep(_POLL_SECONDS)
        return begin, time.monotonic()

    link = Link(arguments.hub, job="raw_mpi", rank=rank)
    for _ in link.orders():
        begin, end = transfer()
        link.answer({"start": begin, "end": end})
    link.close()


if __name__ == "__main__":
    main()
