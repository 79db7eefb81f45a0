"""A tier of Lv.0: keeps this rank's slice of the newest steps on its own machine.

    prepare(layout, rank)     makes room: at least two slots
    begin(attempt, step)      a slot, or None while none is free
      write(frame, bytes)     in any order, from any thread, as the copy engine gets them ready
      seal(...)               bytes durable, then the seal; only now the slice exists
    complete(order)           every rank has sealed that step: whatever is older may go
    void(order)               some rank will never seal that step: it may go
    kept()                    sealed slices in this tier, of any rank and any attempt
    read_into                 for restore

Every tier keeps these rules, and the conformance suite tests them (`tests/conformance/test_tier.py`):

1. The newest step that is known to be complete is never touched; beside it are at most `slots - 1` others.
2. A slot that holds a sealed slice is unsealed, durably, before its first byte is written again.
3. A kill or a loss of power at any point leaves every sealed slice that was not being recycled, whole, and never a mix.
4. If a newer step is complete, sealing an older one gives its slot back and says so.
5. A file of another run, owner or version is left as it is, and the log names it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from holdfast.image.layout import Layout
from holdfast.image.proof_record import Digest
from holdfast.image.slices import SliceSeal
from holdfast.ring.doubts import DoubtedSteps
from holdfast.telemetry.causes import Reason
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind

Order = tuple[int, int]  # (attempt, step)

_NO_REASON = Reason("", "")


class Nearness(StrEnum):
    """Kinds of places, nearest first. If several hold the same slice, restore reads from the nearest."""

    MEMORY = "memory"
    PM = "pm"
    NVME = "nvme"
    FILE = "file"
    RING = "ring"


@dataclass(frozen=True)
class Kept:
    """A sealed slice that was found in a tier."""

    seal: SliceSeal
    layout: Layout  # checked against the seal
    place: str  # the path of the slice, for people, and for the tier to find it again
    slot: int = 0  # for the tier
    absent: frozenset[int] = frozenset()  # chunks without a frame; none in a tier, where a slice is whole
    doubt: str = ""  # why its checkpoint may be torn; empty where nobody doubts it
    complete: bool = False  # every rank is known to have sealed this step
    seal_crc32: int = 0  # of the seal's bytes, where a record names it; for the proof of the slice


class StepVerdict(NamedTuple):
    """Rank 0's decision: every rank has sealed a step in a tier (`complete`), or it is void there, and why."""

    tier: int
    order: Order
    complete: bool
    why: Reason = _NO_REASON

    def to_frame(self) -> bytes:
        attempt, step = self.order
        if self.complete:
            return wire.encode(Kind.COMPLETE, attempt=attempt, step=step, arg=self.tier)
        return wire.encode(Kind.VOID, attempt=attempt, step=step, arg=self.tier, body=reason_body(self.why))

    @classmethod
    def from_frame(cls, frame: Frame) -> StepVerdict:
        complete = frame.kind is Kind.COMPLETE
        why = _NO_REASON if complete else read_reason(frame)
        return cls(frame.arg, (frame.attempt, frame.step), complete, why)


def reason_body(reason: Reason) -> bytes:
    """The body of a SKIPPED or VOID."""
    text = wire.text_body(reason.text).decode(errors="replace")
    return wire.to_json({"cause": reason.cause, "reason": text})


def read_reason(frame: Frame) -> Reason:
    """Why a step is skipped or void. ProtocolError: the message is malformed."""
    body = wire.json_body(frame, cause=str, reason=str)
    return Reason(body["cause"], body["reason"])


class SliceWriter(Protocol):
    """One slice on its way into a slot. `write` belongs to any thread, the rest to one.

    StoreError of `write` and `seal`: the device refused, and the slice does not exist; the message says which device,
    why, and what to do.
    """

    @property
    def memory(self) -> memoryview | None:
        """The slot as writable memory (`area_bytes` long, page-aligned); None where it has none.

        `write` of a frame whose buffer is a part of this memory copies nothing.
        """

    @property
    def copy(self) -> Callable[[int, int, int], object] | None:
        """The best way to put bytes into `memory`: (to address, from address, bytes), like `ctypes.memmove`.

        It releases the GIL. None without memory. Bytes may come in any other way, too (DMA of a device, a store through
        `memory`): `write` of their frame makes them durable all the same. With persistent memory this one stores past
        the caches, and leaves `write` little to do.
        """

    def write(self, frame: int, buffer: memoryview, crc32: int) -> None:
        """Write one frame to its place.

        `frame` is its number in `frames_of(layout, rank)`, `buffer` its `padded_bytes` bytes from page-aligned memory,
        and `crc32` that of the first `nbytes` of them.
        """

    def seal(self, record: Mapping[str, Any]) -> bool:
        """Make all frames durable, then commit. False: a newer step is complete already, and the slot is given back."""

    def abandon(self) -> None:
        """Give the slot back. After `seal` it does nothing."""


class Keeps(ABC):
    """A place that keeps slices: a tier of this rank, or the stager's ring."""

    name: str  # for people; that of a tier is as it is set, such as `nvme:/mnt/nvme0`
    nearness: Nearness
    keeps_proofs = False

    @abstractmethod
    def kept(self) -> list[Kept]:
        """All sealed slices of this run, of any rank, newest first. Reads seals, not slices."""

    def damage(self) -> Sequence[str]:
        """The slices that the last `kept` has left out, with the reasons. The thread that called `kept`."""
        return ()

    @abstractmethod
    def read_into(self, kept: Kept, offset: int, view: memoryview) -> None:
        """Fill `view` with the slice's bytes from `offset` on. Any thread; the caller compares CRCs.

        DamageError: the slice ends before. StoreError: the device refused.
        """

    def opened(self, kept: Kept) -> Callable[[int, memoryview], None]:
        """`read_into` of one slice; it may stay open while anything refers to what is returned."""
        return functools.partial(self.read_into, kept)

    def proof(self, kept: Kept) -> Digest | None:  # noqa: ARG002
        """The data that the rank used in the step after a slice; None if unknown. DamageError: it is damaged."""
        return None


class Tier(Keeps):
    """One tier of one rank. `begin`, `complete`, `void` and `kept` may come from different threads.

    StoreError: the device refused.
    """

    @property
    @abstractmethod
    def how(self) -> str:
        """The way of writing that it uses, in a few words (`O_DIRECT, 4 writers`; `libpmem, MAP_SYNC`)."""

    @property
    @abstractmethod
    def writers(self) -> int:
        """Number of threads that should call `write` at once to keep the device busy."""

    @abstractmethod
    def prepare(self, layout: Layout, rank: int) -> None:
        """Make room for slices of this layout. Slices of other layouts stay until a step of this one is complete.

        ConfigError: the tier is too small (needed, free, where), not ours, or in use by a living process.
        """

    @abstractmethod
    def memories(self) -> Sequence[memoryview]:
        """The memory of each slot, as `SliceWriter.memory`, in the order of first use; empty where it has none."""

    @property
    def is_making(self) -> bool:
        """Whether a slot that is not there yet is made beside training: `begin` will have one more. Any thread."""
        return False

    def await_slot(self, slot: int) -> bool:  # noqa: ARG002
        """Wait until a slot, as numbered by `memories`, is there, or does not come: False. Any thread."""
        return True

    def stop_making(self) -> None:
        """No slot is needed that is not there yet. Any thread."""

    @abstractmethod
    def begin(self, attempt: int, step: int) -> SliceWriter | None:
        """Take a slot for this step; None if every slot is being written or holds a slice that must stay.

        This costs no time of the device, except where the slot is memory: then unsealing it writes a page.
        """

    @abstractmethod
    def complete(self, attempt: int, step: int) -> None:
        """Every rank has sealed this step. May wait for the device, so the training thread must not call it.

        The restored step is named here as well, if it came from this tier: it is then the newest to be kept. A slice
        that was found and is not named stays only while there is room. The log names a device that refuses.
        """

    @abstractmethod
    def void(self, attempt: int, step: int) -> None:
        """Not every rank will seal this step; or not every rank still has a step that was found."""

    @abstractmethod
    def doubt(self, steps: DoubtedSteps) -> None:
        """Record that these steps may be torn: slices of them have it as their `doubt`. Waits for the device."""

    def prove(self, attempt: int, step: int, digest: Digest) -> None:
        """Keep a digest durably, as long as its sealed slice stays; does nothing without one, or `keeps_proofs`."""

    @abstractmethod
    def close(self) -> None:
        """Release files and memory. Sealed slices stay."""


class KeptSteps(Protocol):
    """Counts what the tiers of a rank have done (`trainer_side.ledger.Ledger`)."""

    def kept(self, tier: str) -> None:
        """Count a slice that `tier` has sealed."""

    def skipped(self, tier: str, cause: str) -> None:
        """Count a step that was not kept in `tier`."""

    def refused(self, step: int, reason: Reason) -> None:
        """Count a step that no tier keeps, even if some slices were sealed."""
