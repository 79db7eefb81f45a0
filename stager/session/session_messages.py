"""Events that go into the stager's session, and actions that come out of it.

The session (session.py) is a pure function of these; the table of which event leads to which action in which
phase is in docs/wire.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import Reason
from holdfast.wire.frames import Kind

# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewLayout:
    """Rank 0 announced a layout; offers name it by digest."""

    layout: Layout


@dataclass(frozen=True, slots=True)
class Offer:
    """A rank has captured `step` and is ready to send its slice."""

    rank: int
    step: int
    layout_digest: str
    record: SaveRecord = field(default_factory=SaveRecord)


@dataclass(frozen=True, slots=True)
class Decline:
    """A rank will not take part in `step`. `needed_pickle_bytes` above 0: its pickle has outgrown the reserve."""

    rank: int
    step: int
    reason: Reason
    needed_pickle_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A rank says what it has sent for a credit."""

    rank: int
    step: int
    chunk: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Received:
    """The payload of a credit is in its slot, complete."""

    rank: int
    step: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A rank gives a credit back unused."""

    rank: int
    step: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Done:
    """A rank has sent all; `record` has its times, `fingerprints` those of its replicas, unread."""

    rank: int
    step: int
    record: SaveRecord = field(default_factory=SaveRecord)
    fingerprints: Any = None


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank is dead, has left, or broke the protocol; nothing more comes from it."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankSilent:
    """A rank has said nothing for `silent_seconds`; it may be stopped, cut off, or gone. `name` says which it is."""

    rank: int
    name: str
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class RankBack:
    """A silent rank was heard again."""

    rank: int


@dataclass(frozen=True, slots=True)
class Began:
    """The flusher knows the checkpoint; it writes `part_chunks` chunks at a time."""

    step: int
    part_chunks: int = 1


@dataclass(frozen=True, slots=True)
class SlotsAdded:
    """The ring has grown by these slots, all free."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotsFreed:
    """The flusher has freed these slots."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Durable:
    """The flusher has published a checkpoint."""

    step: int
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The flusher, or the stager itself, cannot go on with a checkpoint."""

    step: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class FlusherGone:
    """The flusher has ended; another one is looked for. Nothing ends by this: what is received stays in the ring."""

    reason: str


@dataclass(frozen=True, slots=True)
class FlusherBack:
    """Another flusher has kept the ring. `freed`: slots that were the flusher's, and that the journal says are free."""

    freed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; looks at the deadlines."""


Event = (
    NewLayout
    | Offer
    | Decline
    | Sent
    | Received
    | Returned
    | Done
    | RankLost
    | RankSilent
    | RankBack
    | Began
    | SlotsAdded
    | SlotsFreed
    | Durable
    | Failed
    | FlusherGone
    | FlusherBack
    | Tick
)


# -- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a control message to one rank, or to all that are left (`rank` None)."""

    rank: int | None
    kind: Kind
    step: int
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BeginReceiving:
    """All ranks offered: tell the flusher, and write down that the checkpoint is being received."""

    step: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class FillSlot:
    """Mark the slot FILLING in the journal; credits for it follow."""

    slot: int
    step: int
    chunk: int


@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Post the receive of `rank`'s pieces of `chunk` into the slot, then send CREDIT."""

    rank: int
    step: int
    chunk: int
    slot: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class CancelReceive:
    """Withdraw a posted receive, because its payload will not come."""

    rank: int
    slot: int


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """Mark a FILLING slot FREE: its chunk was given up."""

    slot: int


@dataclass(frozen=True, slots=True)
class MarkFull:
    """Mark the slot FULL with each source's `(rank, crc)`, and ring the flusher's bell."""

    slot: int
    step: int
    chunk: int
    sources: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class MarkStaged:
    """Every chunk was full: write that down, tell the flusher and all ranks. `records`: what each rank said at DONE.
    `drift`: why its replicas are not the same; empty as far as is known.
    """

    step: int
    layout: Layout
    records: Mapping[int, SaveRecord]
    drift: str = ""


@dataclass(frozen=True, slots=True)
class Diverged:
    """Say loudly that ranks differ where they should be the same; `body`: see `Divergence.to_json`."""

    step: int
    message: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the flusher to drop a checkpoint; with several stagers, also one that it was not told to begin."""

    step: int
    reason: str


Action = (
    Tell
    | BeginReceiving
    | FillSlot
    | GrantCredit
    | CancelReceive
    | FreeSlot
    | MarkFull
    | Diverged
    | MarkStaged
    | Abort
)


# -- what another flusher is told --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """One checkpoint that the flusher has to do with, as the next one must hear of it.

    Attributes:
        step: Its step. `layout_digest`: its layout, which lies beside the ring.
        slots: Slots with its chunks that were handed over and that nobody has said are free, lowest chunk first.
        handed_over: How many chunks were handed over, in these slots and in others.
        staged: Every chunk was handed over, and the ranks know it.
    """

    step: int
    layout_digest: str
    slots: tuple[int, ...]
    handed_over: int
    staged: bool
