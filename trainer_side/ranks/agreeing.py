"""How the ranks tell each other how a stage went, so that an error of one becomes an error of all."""

from __future__ import annotations

import json

from holdfast.errors import DamageError, HoldfastError, StoreMissing
from holdfast.wire.frames import peer_error
from trainer_side.ranks.peers import Peers

__all__ = ["agree", "gather"]

_NAMED = 3  # of many ranks that met damage, so many are named


def gather(peers: Peers, mine: bytes) -> list[bytes]:
    """What every rank says, by rank. Collective."""
    return [peers.broadcast(mine if root == peers.rank else None, root) for root in range(peers.ranks)]


def agree(peers: Peers, error: HoldfastError | None) -> str | None:
    """Tell each other how a stage went. Collective.

    Returns:
        None if it went well everywhere; what is damaged and which rank saw it, if another checkpoint may do.

    Raises:
        HoldfastError: What no other checkpoint mends: this rank's error, or the first one of another rank.
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
