"""The device under a slot file, with a cache that loses power: unflushed writes are kept, lost, or torn.

    SlotFile ─► Device.medium ─► the real file: the view of every process on the machine, also after a kill
                             └─► the durable bytes, and all later writes in pieces
    power_cut: each piece is on the device or not, whatever its age; the file becomes what was left

    blocks   pwrite; pieces of 512 bytes; durable by a flush       (file, nvme)
    mapped   stores; pieces of 64 bytes; durable by a flush        (pm without DAX)
    pm       stores; pieces of 64 bytes; durable when `write` returns, or before, as the caches please

A flush may fail: then each piece is on the device or not, and the kernel forgets that it still has to write it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import StoreError
from trainer_side.tiers.medium import MappedFile, address_of

__all__ = ["Device", "PowerCut"]

_PIECE_BYTES = {"blocks": 512, "mapped": 64, "pm": 64}


class PowerCut(BaseException):
    """The machine dies here."""


@dataclass
class Device:
    """All slot files of one machine.

    Attributes:
        mode: `blocks`, `mapped` or `pm`.
        chance: Decides which pieces survive.
        cut_in: Power fails after this many writes and flushes; -1: never.
        failing: Share of flushes that fail.
        calls: Writes and flushes so far. `failed`: flushes that failed.
    """

    mode: str
    chance: random.Random
    cut_in: int = -1
    failing: float = 0.0
    calls: int = 0
    failed: int = 0
    _durable: dict[Path, bytearray] = field(default_factory=dict)
    _cached: dict[Path, list[tuple[int, bytes]]] = field(default_factory=dict)

    def medium(self, path: Path) -> _Simulated:
        """The medium that a tier opens; a new file is durable, since it was synced before it got its name."""
        if path not in self._durable:
            self._durable[path], self._cached[path] = bytearray(path.read_bytes()), []
        return _Simulated(path, self)

    def power_cut(self) -> None:
        """Cut the power: each file becomes the bytes that survived. Close every tier before."""
        share = self.chance.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        for path, durable in self._durable.items():
            self._settle(path, share)
            path.write_bytes(durable)
        self.cut_in = -1

    def rot(self, path: Path, offset: int) -> None:
        """Change a byte from now on."""
        seen = bytearray(path.read_bytes())
        self._durable[path][offset] ^= 1
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([seen[offset] ^ 1]), offset)

    # -- called by the media -------------------------------------------------------------------------------------

    def wrote(self, path: Path, offset: int, data: bytes) -> None:
        """Record a write, before it reaches the file."""
        if self.mode == "blocks":
            self._cached[path].append((offset, data))
        self._count()

    def stored(self, path: Path, offset: int, nbytes: int) -> None:
        """The bytes are in memory, and `write` is about to return."""
        if self.mode == "pm":
            with path.open("rb") as file:
                self._durable[path][offset : offset + nbytes] = os.pread(file.fileno(), nbytes, offset)

    def flush(self, path: Path) -> None:
        """Make all writes to this file durable, or fail."""
        self._count()
        if self.mode != "pm" and self.chance.random() < self.failing:
            self._settle(path, self.chance.choice([0.0, 0.5, 0.9]))
            self.failed += 1
            raise StoreError(f"{path}: the flush failed")
        if self.mode != "pm":
            self._settle(path, 1.0)

    def _count(self) -> None:
        self.calls += 1
        if self.cut_in == 0:
            raise PowerCut
        if self.cut_in > 0:
            self.cut_in -= 1

    def _settle(self, path: Path, share: float) -> None:
        durable, piece = self._durable[path], _PIECE_BYTES[self.mode]
        if self.mode == "blocks":
            for offset, data in self._cached[path]:
                for at in range(0, len(data), piece):
                    if share == 1.0 or self.chance.random() < share:
                        durable[offset + at : offset + at + piece] = data[at : at + piece]
            self._cached[path] = []
            return
        seen = path.read_bytes()
        if share == 1.0:
            durable[:] = seen
            return
        for at in range(0, len(seen), piece):
            if seen[at : at + piece] != durable[at : at + piece] and self.chance.random() < share:
                durable[at : at + piece] = seen[at : at + piece]


class _Simulated(MappedFile):
    """A medium over the real file, mapped, so that a kill loses no write."""

    def __init__(self, path: Path, device: Device) -> None:
        self._device = device
        super().__init__(path)
        self.write_mode = f"simulated {device.mode}"
        if device.mode == "blocks":
            self.copy = None

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        return None if self._device.mode == "blocks" else super().memory(offset, nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        in_place = address_of(view) == self._address + offset
        if not in_place and self._device.mode != "blocks":
            super().write(offset, view)
        self._device.wrote(self.path, offset, bytes(view))
        if self._device.mode == "blocks":
            super().write(offset, view)
        self._device.stored(self.path, offset, view.nbytes)

    def flush(self) -> None:
        self._device.flush(self.path)
