"""The memory that bytes of an image are read into: windows that are used again, and what takes the bytes from there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from holdfast.crc import crc32
from holdfast.ring.pages import direct_window
from trainer_side.restore.device_sections import SectionPart


class Sum(NamedTuple):
    """CRC-32 of so many bytes."""

    crc32: int
    nbytes: int

    @classmethod
    def of(cls, view: memoryview) -> Sum:
        return cls(crc32(view), view.nbytes)


class EntryTaker(Protocol):
    """Whoever takes bytes of one entry as they are read: all of them, or the parts that a rank holds."""

    def put(self, inside: int, address: int, view: memoryview) -> None:
        """Take what goes to host memory of bytes of the entry, which begin `inside` bytes into it. Any thread."""
        ...

    def parts(self, inside: int, begin: int, nbytes: int, /) -> Sequence[SectionPart]:
        """What goes to a device of `nbytes` of the entry, from `inside` on, which are at `begin` of a window."""
        ...


class EntryTarget(NamedTuple):
    """The memory to which the bytes of one entry go."""

    address: int
    memory: memoryview

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> EntryTarget:
        """The memory of a CPU storage; the view keeps the storage alive."""
        return cls(storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)

    def put(self, inside: int, address: int, view: memoryview) -> None:
        """Take bytes of the entry, which begin `inside` bytes into it. Any thread."""
        # memmove gives the GIL back, so other readers go on.
        ctypes.memmove(self.address + inside, address, view.nbytes)

    def parts(self, _inside: int, _begin: int, _nbytes: int) -> Sequence[SectionPart]:
        """Of host memory: nothing."""
        return ()


class ReadWindow(NamedTuple):
    """Page-aligned memory of one reader."""

    address: int
    memory: memoryview

    @classmethod
    def of_size(cls, nbytes: int) -> ReadWindow:
        """Fresh memory, which is there only when it is touched."""
        memory = direct_window(nbytes)
        return cls(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), memory)
