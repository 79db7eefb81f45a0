"""The interface of restore to the other ranks, so that tests need no MPI.

`MpiPeers` implements it over MPI, `C10dPeers` over gloo. `broadcast`, `all_agree` and `share` are collective: each rank
makes the same calls in the same order, from its training thread. Two ranks `send` and `receive` in the same order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from holdfast.errors import DamageError, HoldfastError, StoreMissing
from holdfast.wire.frames import peer_error

COLLECTIVE_SECONDS_MAX = 600.0  # how long a collective call waits for the other ranks
_WHOLE_BYTES_MIN = 128 << 10  # a piece of this size is a message of its own
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 50e-6, 2e-3
_EAGER_POLLS = 200  # polls that only yield, before a wait begins to sleep: a round trip takes a few polls

Pieces = Sequence[tuple[int, int]]
"""`(address, nbytes)` of runs of memory in this process."""


class Peers(Protocol):
    """The other ranks, as restore sees them. All calls raise `PeerLost` when a rank is lost."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Return the `data` of rank `root` on every rank; the others pass None. Collective."""
        ...

    def all_agree(self, ok: bool) -> bool:
        """Whether `ok` is true on every rank. Collective."""
        ...

    def share(self, pieces: Pieces, root: int) -> None:
        """Queue a copy of scattered memory from `root` to all other ranks. Collective.

        `pieces` are `(address, nbytes)` in this process: sizes are the same on every rank, addresses are not. Until
        `finish` returns, the memory must stay allocated, unchanged at `root` and unread elsewhere.
        """
        ...

    def send(self, pieces: Pieces, rank: int) -> None:
        """Queue a copy of scattered memory to one other rank, which receives pieces of the same sizes.

        The memory must stay unchanged until `finish` returns.
        """
        ...

    def receive(self, pieces: Pieces, rank: int) -> None:
        """Queue the receipt of pieces that `rank` sends."""
        ...

    def poll(self) -> None:
        """Advance queued transfers; never waits. Not collective."""
        ...

    def finish(self, deadline_seconds: float) -> None:
        """Return when all queued transfers are complete. PeerLost: they were not within `deadline_seconds`."""
        ...


class LonePeers:
    """The `Peers` of a job with one rank."""

    rank = 0
    ranks = 1

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        assert data is not None, f"rank {root} gave nothing"
        return data

    def all_agree(self, ok: bool) -> bool:
        return ok

    def share(self, pieces: Pieces, root: int) -> None:
        """Do nothing: there is no other rank."""

    def send(self, pieces: Pieces, rank: int) -> None:
        """Do nothing: there is no other rank."""

    def receive(self, pieces: Pieces, rank: int) -> None:
        """Do nothing: there is no other rank."""

    def poll(self) -> None:
        """Do nothing: no transfer is queued."""

    def finish(self, deadline_seconds: float) -> None:
        """Do nothing: no transfer is queued."""


def poll_until(is_done: Callable[[], bool], deadline: float) -> bool:
    """Poll until `is_done()`, pausing ever longer; False: the deadline has passed. Blocking calls of MPI spin, and
    those of gloo delay this process's signal handlers.
    """
    pause_seconds, polls = _PAUSE_SECONDS_MIN, 0
    while not is_done():
        polls += 1
        if polls <= _EAGER_POLLS:
            time.sleep(0)  # yields the GIL and the core
            continue
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_seconds)
        pause_seconds = min(_PAUSE_SECONDS_MAX, pause_seconds * 1.5)
    return True


def divide(pieces: Pieces, message_bytes_max: int) -> Iterator[list[tuple[int, int]]]:
    """Divide pieces into messages: each large piece by itself, small ones together.

    The division depends only on sizes, so all ranks that take part make the same.
    """
    small = [piece for piece in pieces if piece[1] < _WHOLE_BYTES_MIN]
    for run in (*([piece] for piece in pieces if piece[1] >= _WHOLE_BYTES_MIN), small):
        yield from _cut(run, message_bytes_max)


def _cut(pieces: Pieces, group_bytes: int) -> list[list[tuple[int, int]]]:
    """Cut pieces into groups of exactly `group_bytes`; only the last may be smaller."""
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


_RANKS_SHOWN = 3  # most ranks with damage that are named


def gather(peers: Peers, mine: bytes) -> list[bytes]:
    """Return the messages of all ranks, in rank order. Collective."""
    return [peers.broadcast(mine if root == peers.rank else None, root) for root in range(peers.ranks)]


def agree(peers: Peers, error: HoldfastError | None) -> str | None:
    """Exchange the outcome of a stage among all ranks; None if it succeeded on all. Collective. Return a text that
    names damage and ranks if another checkpoint may work. Raise an error that another checkpoint would not avoid: this
    rank's own, or the first one of another rank.
    """
    if peers.all_agree(error is None):
        return None
    mine = b"" if error is None else json.dumps([error.code, str(error)]).encode()
    found: list[tuple[int, HoldfastError]] = []
    for rank, message in enumerate(gather(peers, mine)):
        if rank == peers.rank and error is not None:
            found.append((rank, error))
        elif message:
            found.append((rank, peer_error(*json.loads(message))))
    final = [(rank, other) for rank, other in found if not isinstance(other, DamageError | StoreMissing)]
    if final:
        rank, error_of_rank = final[0]
        if error is not None and peers.rank in dict(final):
            raise error
        raise type(error_of_rank)(f"rank {rank}: {error_of_rank}")
    if peers.ranks == 1:
        return str(found[0][1])
    named = "; ".join(f"rank {rank}: {other}" for rank, other in found[:_RANKS_SHOWN])
    return f"{named}; and {len(found) - _RANKS_SHOWN} more ranks" if len(found) > _RANKS_SHOWN else named


def raise_agreed(peers: Peers, error: HoldfastError | None) -> None:
    """As `agree`, which may raise; also DamageError on every rank: one has found damage, and another checkpoint may
    work. Collective.
    """
    problem = agree(peers, error)
    if problem is not None:
        raise DamageError(problem)
