"""Rules for every implementation of `Peers`, on three ranks of a real job: `python peers.py CASE OUT`.

The launcher decides which implementation runs. Each rank writes its observations to OUT, as JSON. With PEERS_INIT in
the environment the script sets up `torch.distributed` first.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.config import TrainerConfig
from holdfast.errors import PeerLost
from trainer_side.ranks.joined import join_world
from trainer_side.ranks.peers import Peers, gather
from trainer_side.ranks.world import World

DEADLINE_SECONDS = 60.0
SHORT_SECONDS = 2.0
VICTIM = 1
# Sizes below and above the limit for sending in place, larger than one gloo message, and many small pieces.
SIZES = [1, 7, 0, 131_071, 131_072, 17_000_001, 3, *[4_099] * 5_000, 200_000]


class Scattered:
    """Pieces of these sizes in one memory, in a rank-specific order, separated by guard bytes."""

    GUARD = 0xA5

    def __init__(self, sizes: list[int], *, seed: int, filled: int | None) -> None:
        self._sizes = sizes
        self._memory = np.full(sum(sizes) + len(sizes), self.GUARD, np.uint8)
        order = list(range(len(sizes)))
        random.Random(seed).shuffle(order)
        self._starts, begin = [0] * len(sizes), 0
        for number in order:
            self._starts[number] = begin
            begin += sizes[number] + 1
        for number, piece in enumerate(self._pieces()):
            piece[:] = 0 if filled is None else self._pattern(number, filled)

    def _pieces(self) -> list[Any]:
        return [
            self._memory[start : start + nbytes]
            for start, nbytes in zip(self._starts, self._sizes, strict=True)
        ]

    def _pattern(self, number: int, seed: int) -> Any:
        return np.random.default_rng([seed, number]).integers(0, 256, self._sizes[number], np.uint8)

    def places(self) -> list[tuple[int, int]]:
        """Return the places in the format of `Peers.share`."""
        base = self._memory.ctypes.data
        return [(base + start, nbytes) for start, nbytes in zip(self._starts, self._sizes, strict=True)]

    def has(self, seed: int) -> bool:
        """Whether every byte equals that of `filled=seed`, and no guard byte has changed."""
        same = all(
            np.array_equal(piece, self._pattern(number, seed)) for number, piece in enumerate(self._pieces())
        )
        guards = [start + nbytes for start, nbytes in zip(self._starts, self._sizes, strict=True)]
        return same and bool((self._memory[guards] == self.GUARD).all())


def small(peers: Peers, world: World) -> dict[str, Any]:
    """Broadcast from every rank, and reach agreements of all."""
    texts = [b"", b"x", bytes(range(256)) * 5000]
    heard = [
        peers.broadcast(text if peers.rank == root else None, root) == text
        for root in range(peers.ranks)
        for text in texts
    ]
    agreed = [peers.all_agree(True), peers.all_agree(peers.rank != 1), peers.all_agree(False)]
    said = gather(peers, str(peers.rank).encode())
    return {
        "heard": heard,
        "agreed": agreed,
        "said": [int(text) for text in said],
        "world": [world.rank, world.ranks, world.local_rank, world.one_machine, world.stagers > 0],
        "kind": type(peers).__name__,
    }


def shared(peers: Peers, world: World) -> dict[str, Any]:
    """Each rank shares scattered pieces, queueing all before the first wait, with a broadcast in between."""
    del world
    memories = []
    for root in range(peers.ranks):
        memory = Scattered(SIZES, seed=peers.rank, filled=root if peers.rank == root else None)
        peers.share(memory.places(), root)
        peers.poll()
        memories.append(memory)
    between = peers.broadcast(b"between" if peers.rank == 0 else None)
    peers.finish(DEADLINE_SECONDS)
    peers.finish(DEADLINE_SECONDS)  # nothing is pending
    return {
        "same": [memory.has(root) for root, memory in enumerate(memories)],
        "between": between.decode(),
    }


def passed(peers: Peers, world: World) -> dict[str, Any]:
    """Each rank sends twice to each other one during a share."""
    del world
    others = [rank for rank in range(peers.ranks) if rank != peers.rank]
    kept, got = [], {}
    for turn in range(2):
        sizes = SIZES[: 100 * (turn + 1)]
        for rank in others:
            mine = Scattered(sizes, seed=peers.rank, filled=10 * peers.rank + turn)
            theirs = Scattered(sizes, seed=peers.rank, filled=None)
            first, second = (peers.send, peers.receive)[:: 1 if peers.rank < rank else -1]
            first((mine if first == peers.send else theirs).places(), rank)
            second((mine if second == peers.send else theirs).places(), rank)
            kept.append(mine)
            got[turn, rank] = theirs
        peers.poll()
    of_all = Scattered(SIZES, seed=peers.rank, filled=99 if peers.rank == 2 else None)
    peers.share(of_all.places(), 2)
    peers.finish(DEADLINE_SECONDS)
    same = [theirs.has(10 * rank + turn) for (turn, rank), theirs in got.items()]
    return {"same": [*same, of_all.has(99)], "kept": len(kept)}


def _lost(peers: Peers, victim: Callable[[], None], queue: Callable[[Scattered], None]) -> dict[str, Any]:
    assert peers.all_agree(True)
    if peers.rank == VICTIM:
        victim()
    memory = Scattered(SIZES, seed=peers.rank, filled=None)
    begun = time.monotonic()
    try:
        queue(memory)
        peers.finish(SHORT_SECONDS)
    except PeerLost as error:
        return {"error": str(error), "seconds": time.monotonic() - begun}
    return {"error": ""}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stay_away() -> None:
    time.sleep(10 * SHORT_SECONDS)
    sys.exit(0)


def dead_in_share(peers: Peers, world: World) -> dict[str, Any]:
    """Kill the rank that is to share."""
    del world
    return _lost(peers, _die, lambda memory: peers.share(memory.places(), VICTIM))


def dead_sender(peers: Peers, world: World) -> dict[str, Any]:
    """Kill the rank that is to send."""
    del world
    return _lost(peers, _die, lambda memory: peers.receive(memory.places(), VICTIM))


def silent_in_share(peers: Peers, world: World) -> dict[str, Any]:
    """Let the rank that is to share live, but not share."""
    del world
    return _lost(peers, _stay_away, lambda memory: peers.share(memory.places(), VICTIM))


def silent_sender(peers: Peers, world: World) -> dict[str, Any]:
    """Let the rank that is to send live, but not send."""
    del world
    return _lost(peers, _stay_away, lambda memory: peers.receive(memory.places(), VICTIM))


CASES = [small, shared, passed, dead_in_share, dead_sender, silent_in_share, silent_sender]


def main() -> None:
    case, out = sys.argv[1], Path(sys.argv[2])
    if case.startswith("dead"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the survivors of a dead rank
    if "PEERS_INIT" in os.environ:
        torch.distributed.init_process_group("gloo")
    world = join_world(TrainerConfig())
    peers = world.peers()
    cases = {one.__name__: one for one in CASES}
    for name in case.split(","):
        seen = cases[name](peers, world)
        (out / f"{name}-{peers.rank}.json").write_text(json.dumps(seen))
    if case.startswith(("dead", "silent")):
        os._exit(0)  # under mpirun MPI_Finalize would wait for the ranks that do not take part


if __name__ == "__main__":
    main()
