"""Whether every rank is ready, as rank 0 counts it: a pure core, without messages and without threads.

READY of every rank ─► all go on  ·  one has refused, is dead, or does not come ─► all hear it, and who
"""

from __future__ import annotations

from holdfast.errors import HoldfastError, PeerLost
from holdfast.wire.frames import peer_error

__all__ = ["Muster"]


class Muster:
    """Rank 0's count. Not thread-safe.

    Args:
        ranks: How many there are.
        seconds_max: How long the last rank is waited for after the first.
    """

    def __init__(self, ranks: int, seconds_max: float) -> None:
        self._ranks, self._seconds_max = ranks, seconds_max
        self._said: dict[int, HoldfastError | None] = {}
        self._begun_at = 0.0

    def ready(self, rank: int, code: str, text: str, now: float) -> bool | HoldfastError:
        """Rank `rank` is ready, or (with a code) has refused. False: others are missing; True, or why not: for all."""
        if not self._said:
            self._begun_at = now
        self._said[rank] = peer_error(code, f"rank {rank}: {text}") if code else None
        if len(self._said) < self._ranks:
            return False
        said, self._said = self._said, {}
        return next((said[other] for other in sorted(said) if said[other] is not None), None) or True

    def overdue(self, now: float) -> HoldfastError | None:
        """The answer to all, when some rank has not come in time."""
        if not self._said or now - self._begun_at <= self._seconds_max:
            return None
        missing = [str(rank) for rank in range(self._ranks) if rank not in self._said]
        self._said = {}
        return PeerLost(
            f"rank 0 waited {self._seconds_max:g} s for rank {', '.join(missing)} to prepare for the first checkpoint"
        )

    def lost(self, reason: str) -> HoldfastError | None:
        """The answer to all, when a rank is lost while others wait."""
        if not self._said:
            return None
        self._said = {}
        return PeerLost(f"the ranks cannot prepare for the first checkpoint: {reason}")
