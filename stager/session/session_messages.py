"""Events that go into the stager's session, and actions that come out of it.

The session (session.py) is a pure function of events. The table of events, phases and actions is in docs/wire.md.
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
    """A rank skips `step`. `needed_pickle_bytes` above 0: its pickle has outgrown the reserve."""

    rank: int
    step: int
    reason: Reason
    needed_pickle_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A rank has sent the payload of a credit: its size and CRC."""

    rank: int
    step: int
    chunk: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Received:
    """The complete payload of a credit is in its slot."""

    rank: int
    step: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A rank returns a credit unused."""

    rank: int
    step: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Done:
    """A rank has sent its slice. `record`: its times. `fingerprints`: of its replicas, not parsed yet."""

    rank: int
    step: int
    record: SaveRecord = field(default_factory=SaveRecord)
    fingerprints: Any = None


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank is dead, has left, or broke the protocol; no more events come from it."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankSilent:
    """A rank was silent for `silent_seconds`: it may be stopped, cut off, or gone. `name`: its rank and host."""

    rank: int
    name: str
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class RankBack:
    """A silent rank was heard again."""

    rank: int


@dataclass(frozen=True, slots=True)
class Began:
    """The flusher has begun the checkpoint; it writes `part_chunks` chunks at a time."""

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
    """The flusher, or the stager itself, has given up a checkpoint."""

    step: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class FlusherLost:
    """The flusher has ended, and the stager looks for another one. No checkpoint ends: chunks stay in the ring."""

    reason: str


@dataclass(frozen=True, slots=True)
class FlusherReplaced:
    """Another flusher has kept the ring. `freed`: slots that the last one freed, by the journal."""

    freed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: check the deadlines."""


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
    | FlusherLost
    | FlusherReplaced
    | Tick
)


# -- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a control message to one rank, or to all present ranks (`rank` None)."""

    rank: int | None
    kind: Kind
    step: int
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BeginReceiving:
    """All ranks have offered: record that the checkpoint is being received, and tell the flusher."""

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
    """Mark the slot FULL with each source's `(rank, crc)`, and tell the flusher."""

    slot: int
    step: int
    chunk: int
    sources: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class MarkStaged:
    """Every chunk is full: record that, then tell the flusher and all ranks. `records`: each rank's record from DONE.
    `drift`: how replicas differ; empty if no difference is known.
    """

    step: int
    layout: Layout
    records: Mapping[int, SaveRecord]
    drift: str = ""


@dataclass(frozen=True, slots=True)
class Diverged:
    """Log as an error that replicas differ between ranks; `body`: see `Divergence.to_json`."""

    step: int
    message: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the flusher to drop a checkpoint; with several stagers, also one that was never begun."""

    step: int
    reason: str


Action = (
    SendMessage
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


# -- for the next flusher ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """One open checkpoint, as the next flusher is told of it.

    Attributes:
        layout_digest: Names its layout, which lies beside the ring.
        slots: Slots with its chunks that were handed over and not reported free, lowest chunk first.
        handed_over: How many chunks were handed over, in these slots and in freed ones.
        staged: Every chunk was handed over, and the ranks were told.
    """

    step: int
    layout_digest: str
    slots: tuple[int, ...]
    handed_over: int
    staged: bool
