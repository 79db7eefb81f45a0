"""The interface of restore to the other ranks: seven calls, so that tests need no MPI.

    broadcast   small bytes (manifest, structure) from one rank to all          all_agree   did everybody succeed?
    share       tensor bytes, from where they lie on one rank to where they lie on the others; queued
    send        the same to one other rank, which calls `receive`; queued
    poll        moves on what was queued, and never waits
    finish      returns when all that was queued has arrived

`MpiPeers` has them over MPI, `C10dPeers` over gloo. `broadcast`, `all_agree` and `share` are collective: each rank
makes the same calls in the same order, from its training thread. Two ranks `send` and `receive` in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Protocol

from holdfast.errors import DamageError, HoldfastError, StoreMissing
from holdfast.wire.frames import peer_error


class Peers(Protocol):
    """The training ranks, as restore sees them. All calls raise `PeerLost` when a rank is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Return on every rank the bytes that `root` gave; the others give None. Collective."""
        ...

    def all_agree(self, ok: bool) -> bool:
        """Whether `ok` is true on every rank. Collective."""
        ...

    def share(self, pieces: Sequence[tuple[int, int]], root: int) -> None:
        """Queue the copy of scattered memory from `root` to all others. Every rank queues the same ones.

        `pieces` are `(address, nbytes)` in this process: sizes are the same on every rank, addresses are not. Until
        `finish` returns, the memory must stay where it is, unchanged at `root` and unread elsewhere.
        """
        ...

    def send(self, pieces: Sequence[tuple[int, int]], rank: int) -> None:
        """Queue the copy of scattered memory to one other rank, which receives pieces of the same sizes.

        The memory must stay unchanged until `finish` returns.
        """
        ...

    def receive(self, pieces: Sequence[tuple[int, int]], rank: int) -> None:
        """Queue the receiving of what `rank` sends."""
        ...

    def poll(self) -> None:
        """Move on what was shared; never waits, and need not be called alike on every rank."""
        ...

    def finish(self, deadline_seconds: float) -> None:
        """Return when all that was queued has arrived and left. PeerLost: it has not within `deadline_seconds`."""
        ...


class LonePeers:
    """One rank by itself."""

    rank = 0
    ranks = 1

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        assert data is not None, f"rank {root} gave nothing"
        return data

    def all_agree(self, ok: bool) -> bool:
        return ok

    def share(self, pieces: Sequence[tuple[int, int]], root: int) -> None:
        """There is nobody to share with."""

    def send(self, pieces: Sequence[tuple[int, int]], rank: int) -> None:
        """There is nobody to send to."""

    def receive(self, pieces: Sequence[tuple[int, int]], rank: int) -> None:
        """There is nobody who sends."""

    def poll(self) -> None:
        """Nothing was queued."""

    def finish(self, deadline_seconds: float) -> None:
        """Nothing was queued."""


def cut(pieces: Iterable[tuple[int, int]], group_bytes: int) -> list[list[tuple[int, int]]]:
    """Cut pieces into groups of exactly `group_bytes`, the last one less: the same cuts however the pieces differ."""
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for address, nbytes in pieces:
        while nbytes > 0:
            if room == 0:
                groups.append([])
                room = group_bytes
            taken = min(nbytes, room)
            groups[-1].append((address, taken))
            address, nbytes, room = address + taken, nbytes - taken, room - taken
    return groups


_NAMED = 3  # most ranks with damage that are named


def gather(peers: Peers, mine: bytes) -> list[bytes]:
    """The messages of all ranks, in their order. Collective."""
    return [peers.broadcast(mine if root == peers.rank else None, root) for root in range(peers.ranks)]


def agree(peers: Peers, error: HoldfastError | None) -> str | None:
    """Tell each other how a stage went: None if it went well everywhere. Collective.

    If another checkpoint may do, returns what is damaged and which rank saw it. An error that another checkpoint would
    not avoid is raised: this rank's, or the first of another rank.
    """
    if peers.all_agree(error is None):
        return None
    mine = b"" if error is None else json.dumps([error.code, str(error)]).encode()
    found: list[tuple[int, HoldfastError]] = []
    for rank, said in enumerate(gather(peers, mine)):
        if rank == peers.rank and error is not None:
            found.append((rank, error))
        elif said:
            found.append((rank, peer_error(*json.loads(said))))
    final = [(rank, other) for rank, other in found if not isinstance(other, DamageError | StoreMissing)]
    if final:
        rank, error_of_rank = final[0]
        if error is not None and peers.rank in dict(final):
            raise error
        raise type(error_of_rank)(f"rank {rank}: {error_of_rank}")
    if peers.ranks == 1:
        return str(found[0][1])
    named = "; ".join(f"rank {rank}: {other}" for rank, other in found[:_NAMED])
    return f"{named}; and {len(found) - _NAMED} more ranks" if len(found) > _NAMED else named


def raise_agreed(peers: Peers, error: HoldfastError | None) -> None:
    """Tell each other how a stage went. Collective.

    Raises:
        DamageError: On every rank: some rank has met damage, and another checkpoint may do.
        HoldfastError: As `agree`.
    """
    problem = agree(peers, error)
    if problem is not None:
        raise DamageError(problem)
