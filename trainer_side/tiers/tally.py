"""Rank 0 decides which steps every rank has sealed: a pure core, without messages and without threads.

    SEALED(tier, order) of every rank, of one layout ─────────────► COMPLETE, to all
    SKIPPED of one rank · another layout · too late · a newer one ─► VOID, to all

Each tier is decided by itself: a step that is complete in the memory of all machines does not help where only their
disks are left. One rank decides, and once: no step is ever complete to one rank and void to another. So a rank that
overwrites older steps after COMPLETE never overwrites the last step that all ranks hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import HoldfastError, PeerLost
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind, peer_error

Order = tuple[int, int]  # (attempt, step)


class StepVerdict(NamedTuple):
    """Whether a step is complete in a tier, or void. `why`: the reason where it is void, for people."""

    tier: int
    order: Order
    complete: bool
    why: str = ""

    def to_frame(self) -> bytes:
        """The COMPLETE or VOID message."""
        kind = Kind.COMPLETE if self.complete else Kind.VOID
        attempt, step = self.order
        return wire.encode(kind, attempt=attempt, step=step, arg=self.tier, body=wire.text_body(self.why))

    @classmethod
    def from_frame(cls, frame: Frame) -> StepVerdict:
        """Read a COMPLETE or a VOID."""
        order = (frame.attempt, frame.step)
        return cls(frame.arg, order, frame.kind is Kind.COMPLETE, wire.body_text(frame))


@dataclass
class _Ballot:
    since: float
    layout: str
    sealed: set[int] = field(default_factory=set)


class Tally:
    """Counts the slices that are sealed. Not thread-safe.

    Args:
        ranks: Number of ranks.
        seconds_max: How long to wait for the last rank after the first.
        open_max: How many steps of one tier may be undecided, which bounds the memory; beyond it the oldest is void.
    """

    def __init__(self, ranks: int, *, seconds_max: float, open_max: int = 64) -> None:
        self._ranks, self._seconds_max, self._open_max = ranks, seconds_max, open_max
        self._open: dict[tuple[int, Order], _Ballot] = {}
        self._newest: dict[int, Order] = {}
        self._lost: dict[int, str] = {}

    @property
    def undecided(self) -> int:
        """How many steps are undecided, over all tiers."""
        return len(self._open)

    def sealed(self, rank: int, tier: int, order: Order, layout: str, now: float) -> list[StepVerdict]:
        """A rank has sealed its slice, of the layout with this digest. Each rank says so once for each slice."""
        if order <= self._newest.get(tier, (0, 0)):
            return [StepVerdict(tier, order, complete=False, why="a newer step is complete")]
        ballot = self._open.setdefault((tier, order), _Ballot(now, layout))
        if ballot.layout != layout:
            return [self._void(tier, order, f"rank {rank} has another layout than the ranks before it")]
        ballot.sealed.add(rank)
        if len(ballot.sealed) == self._ranks:
            return self._complete(tier, order)
        if self._lost.keys() - ballot.sealed:
            return [self._void(tier, order, self._of_lost(ballot))]
        mine = [key for key in self._open if key[0] == tier]
        if len(mine) > self._open_max:
            oldest = min(mine)[1]
            return [self._void(tier, oldest, f"more than {self._open_max} steps are undecided")]
        return []

    def skipped(self, rank: int, tier: int, order: Order, why: str) -> list[StepVerdict]:
        """A rank will never seal its slice."""
        return [self._void(tier, order, f"rank {rank}: {why}")]

    def lost(self, rank: int, why: str) -> list[StepVerdict]:
        """A rank will seal nothing more: every step that it has not sealed by now is void."""
        self._lost[rank] = why
        return [
            self._void(tier, order, self._of_lost(ballot))
            for (tier, order), ballot in list(self._open.items())
            if rank not in ballot.sealed
        ]

    def overdue(self, now: float) -> list[StepVerdict]:
        """Steps that some rank has not sealed in time."""
        found = []
        for (tier, order), ballot in list(self._open.items()):
            if now - ballot.since > self._seconds_max:
                missing = [str(rank) for rank in range(self._ranks) if rank not in ballot.sealed]
                why = f"rank {', '.join(missing)} has not sealed it within {self._seconds_max:g} s"
                found.append(self._void(tier, order, why))
        return found

    def _complete(self, tier: int, order: Order) -> list[StepVerdict]:
        del self._open[tier, order]
        self._newest[tier] = order
        older = [other for at, other in self._open if at == tier and other < order]
        why = f"step {order[1]} is complete, and newer"
        return [StepVerdict(tier, order, complete=True), *(self._void(tier, other, why) for other in older)]

    def _void(self, tier: int, order: Order, why: str) -> StepVerdict:
        # A void step is forgotten: a rank that seals it later opens a new ballot, in which the other ranks never vote.
        self._open.pop((tier, order), None)
        return StepVerdict(tier, order, complete=False, why=why)

    def _of_lost(self, ballot: _Ballot) -> str:
        missing = sorted(self._lost.keys() - ballot.sealed)
        return "; ".join(f"rank {rank} {self._lost[rank]}" for rank in missing)


class Muster:
    """Counts the ranks that have prepared for the first layout. Not thread-safe.

    Args:
        ranks: Number of ranks.
        seconds_max: How long to wait for the last rank after the first.
    """

    def __init__(self, ranks: int, seconds_max: float) -> None:
        self._ranks, self._seconds_max = ranks, seconds_max
        self._said: dict[int, HoldfastError | None] = {}
        self._begun_at = 0.0

    def ready(self, rank: int, code: str, text: str, now: float) -> bool | HoldfastError:
        """A rank is ready, or has refused with an error code. Returns False while ranks are missing."""
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
