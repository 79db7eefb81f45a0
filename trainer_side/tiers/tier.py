"""A tier of Lv.0: keeps this rank's slice of the newest steps, on its own machine or, as a fallback, in the store.

    prepare(layout, rank)     makes room: at least two slots
    begin(attempt, step)      a slot, or None while none is free
      write(frame, bytes)     in any order, from any thread, as the copy engine gets them ready
      seal(...)               bytes durable, then the seal; only now the slice exists
    complete(order)           every rank has sealed that step: whatever is older may go
    void(order)               some rank will never seal that step: it may go
    kept()                    sealed slices that are found here, of any rank and any attempt
    read_into                 for restore

Rules that every tier keeps, and the conformance suite tests (`tests/conformance/test_tier.py`):

1. The newest step that is known to be complete is never touched, and at most `slots - 1` others are there beside it.
2. A slot that holds a sealed slice is unsealed, durably, before its first byte is written again.
3. A kill or a loss of power at any point leaves every sealed slice that was not being recycled, whole, and never a mix.
4. Where a newer step is complete, sealing an older one gives its slot back and says so.
5. What belongs to another run, owner or version is left as it is, and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from holdfast.image.layout import Layout
from holdfast.image.slices import SliceSeal


class Nearness(StrEnum):
    """What a tier is made of; nearest first. Among equals, restore reads from the nearest."""

    MEMORY = "memory"
    PM = "pm"
    NVME = "nvme"
    FILE = "file"
    RING = "ring"
    STORE = "store"


@dataclass(frozen=True)
class Kept:
    """A sealed slice that was found in a tier.

    Attributes:
        seal: What it says of itself.
        layout: Of the image that it is a slice of; checked against the seal.
        place: Where it lies, for people; and for the tier, to find it again.
        slot: For the tier.
        absent: Chunks whose frame is not there; none in a tier, where a sealed slice is whole.
    """

    seal: SliceSeal
    layout: Layout
    place: str
    slot: int = 0
    absent: frozenset[int] = frozenset()


class SliceWriter(Protocol):
    """One slice on its way into a slot. `write` belongs to any thread, the rest to one."""

    @property
    def memory(self) -> memoryview | None:
        """The slot itself, where it can be written to as memory (`area_bytes` long, page-aligned); else None.

        What lies there already need not be written: `write` of a frame whose buffer is a part of it copies nothing.
        """
        ...

    @property
    def copy(self) -> Callable[[int, int, int], object] | None:
        """How bytes are best put into `memory`: (to address, from address, bytes), as `ctypes.memmove`; GIL given back.

        None where there is no memory. Bytes may be put there in any other way, too (a device's DMA, a store through
        `memory`): `write` of their frame makes them durable all the same. With persistent memory this one stores past
        the caches, and leaves `write` little to do.
        """
        ...

    def write(self, frame: int, buffer: memoryview, crc32: int) -> None:
        """Put one frame in its place.

        Args:
            frame: Its number in `frames_of(layout, rank)`.
            buffer: Its bytes, `padded_bytes` of them, from page-aligned memory.
            crc32: Of its first `nbytes`.

        Raises:
            StoreError: The device refused: which, why, what to do.
        """
        ...

    def seal(self, record: Mapping[str, Any]) -> bool:
        """Make all frames durable, then commit. False: a newer step is complete already, and the slot is given back.

        Raises:
            StoreError: As `write`; the slice does not exist then.
        """
        ...

    def abandon(self) -> None:
        """Give the slot back. After `seal` it does nothing."""
        ...


class Tier(Protocol):
    """One tier of one rank. `begin`, `complete`, `void` and `kept` may come from different threads."""

    @property
    def name(self) -> str:
        """As people set it, such as `nvme:/mnt/nvme0`."""
        ...

    @property
    def nearness(self) -> Nearness:
        """What it is made of."""
        ...

    @property
    def how(self) -> str:
        """Which way of writing it found and uses, in a few words (`O_DIRECT, 4 writers`; `libpmem, MAP_SYNC`)."""
        ...

    @property
    def writers(self) -> int:
        """How many threads should call `write` at once for the device to be busy."""
        ...

    def prepare(self, layout: Layout, rank: int) -> None:
        """Make room for slices of this layout; those of other layouts stay until a step of this one is complete.

        Raises:
            ConfigError: Too small (needed, free, where), not ours, in use by a living process.
            StoreError: The device refused.
        """
        ...

    def begin(self, attempt: int, step: int) -> SliceWriter | None:
        """A free slot for this step; None if all are being written, or hold what must be kept.

        Costs no time of the device but where the slot is memory: then its unsealing, a page.

        Raises:
            StoreError: The device refused.
        """
        ...

    def complete(self, attempt: int, step: int) -> None:
        """Every rank has sealed it. May wait for the device: not for the training thread.

        Also to be said of the step that was restored, where it came from this tier: it is the newest to be kept then.
        What was found and is not named stays only while there is room. A device that refuses is named in the log.
        """
        ...

    def void(self, attempt: int, step: int) -> None:
        """Not every rank will seal it; or, of a step that was found: not every rank still has it."""
        ...

    def kept(self) -> list[Kept]:
        """All sealed slices of this run that are found here, of any rank, newest first. Bytes are not read."""
        ...

    def read_into(self, kept: Kept, offset: int, view: memoryview) -> None:
        """Fill `view` with the slice's bytes from `offset` on. Any thread; unchecked: the caller compares CRCs.

        Raises:
            DamageError: The slice ends before.
            StoreError: The device refused.
        """
        ...

    def close(self) -> None:
        """Let go of files and memory. What is sealed stays."""
        ...


class Keeps(Protocol):
    """Something that keeps slices: a tier of this rank, or the stager's ring. As `trainer_side.tiers.tier.Tier`."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def nearness(self) -> Nearness:
        """What it is made of."""
        ...

    def kept(self) -> list[Kept]:
        """All slices that are found here."""
        ...

    def read_into(self, kept: Kept, offset: int, view: memoryview) -> None:
        """Fill `view` with the slice's bytes from `offset` on. Any thread."""
        ...


class KeptSteps(Protocol):
    """Where a rank counts what its tiers have done (`trainer_side.ledger.Ledger`)."""

    def kept(self, tier: str) -> None:
        """Count a slice that `tier` has sealed."""
        ...

    def skipped(self, tier: str, cause: str) -> None:
        """Count a step that was not kept in `tier`."""
        ...
