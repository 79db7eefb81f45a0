"""What restore asks of the other ranks: five calls, so that it needs no MPI to be tested.

    broadcast   small bytes (manifest, structure) from one rank to all          all_agree   did everybody succeed?
    share       tensor bytes, from where they lie on one rank to where they lie on the others; queued
    poll        moves on what was queued, and never waits
    finish      returns when all that was queued has arrived

`trainer_side/ranks/mpi.py` has the real one. Every call but `poll` is collective: each rank makes the same calls in
the same order, from its training thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["LonePeers", "Peers"]


class Peers(Protocol):
    """The training ranks, as restore sees them. All calls but `poll` are collective.

    All raise `PeerLost` when a rank is gone.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        ...

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Return on every rank the bytes that `root` gave; the others give None."""
        ...

    def all_agree(self, ok: bool) -> bool:
        """Whether `ok` is true on every rank."""
        ...

    def share(self, pieces: Sequence[tuple[int, int]], root: int) -> None:
        """Queue the copy of scattered memory from `root` to all others.

        Args:
            pieces: `(address, nbytes)` in this process: sizes are the same on every rank, addresses are not. The memory
                must live, and on `root` hold its bytes, until `finish` returns.
            root: The rank that has the bytes.
        """
        ...

    def poll(self) -> None:
        """Move on what was shared; never waits, and need not be called alike on every rank."""
        ...

    def finish(self, deadline_seconds: float) -> None:
        """Return when everything that was shared has arrived here and has left here.

        Raises:
            PeerLost: It has not within `deadline_seconds`.
        """
        ...


class LonePeers:
    """One rank by itself."""

    rank = 0
    ranks = 1

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """The bytes themselves."""
        assert data is not None, f"rank {root} gave nothing"
        return data

    def all_agree(self, ok: bool) -> bool:
        """What this rank says."""
        return ok

    def share(self, pieces: Sequence[tuple[int, int]], root: int) -> None:
        """There is nobody to share with."""

    def poll(self) -> None:
        """Nothing was queued."""

    def finish(self, deadline_seconds: float) -> None:
        """Nothing was queued."""
