"""A tier of Lv.0: keeps this rank's slice of the newest steps on its own machine.

    prepare ─► begin: a slot ─► write its frames, in any order ─► seal ─► complete, or void ─► kept_slices, read_into

Every tier keeps these rules, and the conformance suite tests them (`tests/conformance/test_tier.py`):

1. The newest step that is known to be complete is never touched; beside it are at most `slots - 1` others.
2. A slot that holds a sealed slice is unsealed, durably, before its first byte is overwritten.
3. A kill or power loss at any point leaves every sealed slice that is not being recycled whole, and never a mix.
4. If a newer step is complete, `seal` of an older one frees its slot and returns False.
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
class SealedSlice:
    """A sealed slice found in a tier."""

    seal: SliceSeal
    layout: Layout  # checked against the seal
    place: str  # the path of the slice, for messages and for the tier
    slot: int = 0  # for the tier
    absent: frozenset[int] = frozenset()  # chunks without a frame; none in a tier, where a slice is whole
    doubt: str = ""  # why its checkpoint may be torn; empty without doubt
    complete: bool = False  # every rank is known to have sealed this step
    seal_crc32: int = 0  # of the seal's bytes, if a record names it; for the proof of the slice


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
    """Encode the body of a SKIPPED or VOID."""
    text = wire.encode_text(reason.text).decode(errors="replace")
    return wire.to_json({"cause": reason.cause, "reason": text})


def read_reason(frame: Frame) -> Reason:
    """Return why a step is skipped or void. ProtocolError: the message is malformed."""
    body = wire.json_body(frame, cause=str, reason=str)
    return Reason(body["cause"], body["reason"])


class SliceWriter(Protocol):
    """One slice in flight to a slot. `write` belongs to any thread, the other methods to one.

    StoreError of `write` and `seal`: the device refused, and the slice does not exist; the message has the device, the
    reason and the remedy.
    """

    @property
    def memory(self) -> memoryview | None:
        """The slot as writable memory (`area_bytes` long, page-aligned); None if it has none.

        `write` of a frame whose buffer is a part of this memory copies nothing.
        """

    @property
    def copy(self) -> Callable[[int, int, int], object] | None:
        """The best way to put bytes into `memory`: (to address, from address, bytes), like `ctypes.memmove`.

        Releases the GIL. None without memory. `write` also makes bytes durable that arrive in other ways, such as DMA.
        """

    def write(self, frame: int, buffer: memoryview, crc32: int) -> None:
        """Write one frame, by its number in `frames_of`: its `padded_bytes`, page-aligned. The CRC is of `nbytes`."""

    def seal(self, record: Mapping[str, Any]) -> bool:
        """Make all frames durable, then commit. False: a newer step is complete already, and the slot is freed."""

    def abandon(self) -> None:
        """Free the slot; does nothing after `seal`."""


class SliceKeeper(ABC):
    """A place that keeps slices: a tier of this rank, or the stager's ring."""

    name: str  # for people; a tier's as in the setting, such as `nvme:/mnt/nvme0`
    nearness: Nearness
    keeps_proofs = False

    @abstractmethod
    def kept_slices(self) -> list[SealedSlice]:
        """Return all sealed slices of this run, of any rank, newest first. Reads seals, not slices."""

    def damage(self) -> Sequence[str]:
        """Return the slices that the last `kept_slices` has left out, with reasons. The thread that called it."""
        return ()

    @abstractmethod
    def read_into(self, kept: SealedSlice, offset: int, view: memoryview) -> None:
        """Fill `view` with the slice's bytes from `offset` on. Any thread; the caller compares CRCs.

        DamageError: the slice is too short. StoreError: the device refused.
        """

    def open_reader(self, kept: SealedSlice) -> Callable[[int, memoryview], None]:
        """Return `read_into` for one slice, whose file may stay open as long as the result is referenced."""
        return functools.partial(self.read_into, kept)

    def proof(self, kept: SealedSlice) -> Digest | None:  # noqa: ARG002
        """Return the proof of a slice: the digest of its rank's next step; None if unknown. DamageError: damaged."""
        return None


class Tier(SliceKeeper):
    """One tier of one rank. Different threads may call `begin`, `complete`, `void` and `kept_slices`.

    StoreError: the device refused.
    """

    @property
    @abstractmethod
    def write_mode(self) -> str:
        """The way of writing, in a few words (`O_DIRECT, 4 writers`; `libpmem, MAP_SYNC`)."""

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
        """Return the memory of each slot, as `SliceWriter.memory`, in the order of first use; empty without any."""

    @property
    def is_making_slots(self) -> bool:
        """Whether another slot is being made beside training, for a later `begin`. Any thread."""
        return False

    def await_slot(self, slot: int) -> bool:  # noqa: ARG002
        """Wait until a slot, as numbered by `memories`, is made; False if it will not be. Any thread."""
        return True

    def stop_making_slots(self) -> None:
        """Make no further slots. Any thread."""

    @abstractmethod
    def begin(self, attempt: int, step: int) -> SliceWriter | None:
        """Take a slot for this step; None if every slot is being written or holds a slice that must stay.

        Does not wait for the device, except that unsealing a slot in memory writes a page.
        """

    @abstractmethod
    def complete(self, attempt: int, step: int) -> None:
        """Note that every rank has sealed this step. May wait for the device: not on the training thread.

        The restored step is named here as well, if it came from this tier: it is then the newest step to keep. A found
        slice that is not named stays only while there is room. The log names a device that refuses.
        """

    @abstractmethod
    def void(self, attempt: int, step: int) -> None:
        """Note that not every rank will seal this step, or still has it if the step was found."""

    @abstractmethod
    def record_doubt(self, steps: DoubtedSteps) -> None:
        """Record that these steps may be torn, as the `doubt` of their slices. Waits for the device."""

    def keep_proof(self, attempt: int, step: int, digest: Digest) -> None:
        """Keep a digest durably, as long as its sealed slice stays; does nothing without slice or `keeps_proofs`."""

    @abstractmethod
    def close(self) -> None:
        """Release files and memory. Sealed slices stay."""


class TierCounter(Protocol):
    """Counts what the tiers of a rank have done (`trainer_side.ledger.Ledger`)."""

    def record_kept(self, tier: str) -> None:
        """Count a slice that `tier` has sealed."""

    def record_skipped(self, tier: str, cause: str) -> None:
        """Count a step that was not kept in `tier`."""

    def record_refused(self, step: int, reason: Reason) -> None:
        """Count a step that no tier keeps, even if some slices were sealed."""
