"""The origins of a rank's bytes: a portable file in the store, or a slice in one of its tiers or in the stager's ring.

Both say for each unit where it lies in them and what its CRC-32 must be; `reading.py` does the rest.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from holdfast.errors import DamageError, HoldfastError, StoreError
from holdfast.image.manifest import Manifest
from holdfast.image.regions import Extent
from holdfast.image.slices import frames_of
from holdfast.store.base import Store
from trainer_side.ranks.deadlines import HANGING_SHARE
from trainer_side.restore.choice import Unit
from trainer_side.tiers.tier import Keeps, Kept, Nearness

_TIER_REQUEST_BYTES = 4 << 20  # a multiple of the page size; what was read is still in the processor's cache


class Lying(NamedTuple):
    """The place of a unit: `extents` of the image, back to back from `offset` on, all covered by one CRC-32."""

    extents: tuple[Extent, ...]
    offset: int
    crc32: int
    what: str


class Origin(Protocol):
    """Something that units can be read from. Any thread."""

    @property
    def tier(self) -> str:
        """The tier or the store, for people and reports."""
        ...

    @property
    def what(self) -> str:
        """All of it, for messages."""
        ...

    @property
    def request_bytes(self) -> int:
        """How much to ask for at once."""
        ...

    @property
    def seconds_share(self) -> float:
        """Which part of the time for restoring one request may take; then it hangs, and another source is asked."""
        ...

    def lying(self, unit: Unit) -> Lying: ...

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset` on.

        Raises:
            DamageError: It ends before.
            StoreError: Device or store failed.
        """
        ...


class StoredFile:
    """A portable file. There is nothing behind it, so the time for restoring is the only limit."""

    seconds_share = math.inf

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self.tier = store.url
        self.what = f"{store.url}/{manifest.file}"
        self.request_bytes = store.request_bytes

    def lying(self, unit: Unit) -> Lying:
        """The whole chunk: that is what has a CRC."""
        manifest = self._manifest
        offset = unit.chunk * manifest.chunk_bytes
        extent = Extent(offset, min(manifest.chunk_bytes, manifest.image_bytes - offset))
        what = f"chunk {unit.chunk} ({extent.nbytes} bytes from {offset})"
        return Lying((extent,), offset, manifest.chunk_crc32s[unit.chunk], what)

    def read_into(self, offset: int, view: memoryview) -> None:
        self._store.read_into(self._manifest.file, offset, view)


class KeptSlice:
    """A slice in a tier."""

    request_bytes = _TIER_REQUEST_BYTES

    def __init__(self, tier: Keeps, kept: Kept) -> None:
        self._tier, self._kept = tier, kept
        self._frames = frames_of(kept.layout, kept.seal.rank)
        seal = kept.seal
        self.tier = tier.name
        self.seconds_share = StoredFile.seconds_share if tier.nearness is Nearness.STORE else HANGING_SHARE
        whose = f"rank {seal.rank}'s slice of step {seal.step} (attempt {seal.attempt})"
        self.what = f"{tier.name}: {whose} in {kept.place} slot {kept.slot}"

    def lying(self, unit: Unit) -> Lying:
        frame = self._frames[unit.frame]
        what = f"frame {unit.frame} ({frame.nbytes} bytes from {frame.offset})"
        return Lying(frame.extents, frame.offset, self._kept.seal.frame_crc32s[unit.frame], what)

    def read_into(self, offset: int, view: memoryview) -> None:
        """As the tier does it; what it raises otherwise becomes a `StoreError`."""
        try:
            self._tier.read_into(self._kept, offset, view)
        except (DamageError, StoreError):
            raise
        except (HoldfastError, OSError, ValueError) as error:
            raise StoreError(f"{self.what}: {error}") from error
