"""GPM's way (Pandey et al., ASPLOS 2022), as PCcheck compares it, written by us: a baseline, not their code.

    save(): training stops ─► copy of the state into a mapped file ─► msync ─► the record names it ─► msync

Kinder to it than its code is: the file is preallocated and mapped once, and there are two slots, so that an older
checkpoint is whole at any time. Rank 0 alone saves: one of the replicas.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import torch

from benchmarks.complete import IncompleteError, require_same
from benchmarks.peers.flat_state import PAGE_BYTES, FlatState, parsed
from benchmarks.workload import Workload

__all__ = ["GpmLike"]

_RECORD = struct.Struct("<QQ")  # slot + 1, bytes in it; on the first page of the file
_SLOTS = 2


class GpmLike:
    """One checkpoint at a time, in the training thread."""

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        self._workload, self._rank = workload, rank
        if rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._slot = folder / "gpm.slots", 0
        self._slot_bytes = FlatState(workload.state_dict()).room_bytes
        nbytes = PAGE_BYTES + _SLOTS * self._slot_bytes
        with self._path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            os.fsync(file.fileno())
            self._map = mmap.mmap(file.fileno(), nbytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def save(self, step: int) -> None:  # noqa: ARG002 - the slots count
        if self._rank:
            return
        self._slot = 1 - self._slot
        state, begin = FlatState(self._workload.state_dict()), PAGE_BYTES + self._slot * self._slot_bytes
        state.copy_to(self._memory[begin:])
        self._map.flush(begin, self._slot_bytes)
        self._map[: _RECORD.size] = _RECORD.pack(self._slot + 1, state.nbytes)
        self._map.flush(0, PAGE_BYTES)

    def before_update(self) -> None:
        """Do nothing: `save` has waited."""

    def done(self) -> bool:
        return True

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        if self._rank:
            return 0
        with self._path.open("rb") as file:
            record = file.read(_RECORD.size)
            named, nbytes = _RECORD.unpack(record) if len(record) == _RECORD.size else (0, 0)
            if not named:
                raise IncompleteError("gpm-like: the record names no slot")
            data = memoryview(bytearray(nbytes))
            file.seek(PAGE_BYTES + (named - 1) * self._slot_bytes)
            file.readinto(data)
        return require_same(self._workload.state_dict(), parsed(data, what="gpm-like"), what="gpm-like")

    def clean(self) -> None:
        """Do nothing: the preallocated slots stay."""

    def close(self) -> None:
        if self._rank:
            return
        del self._memory
        self._map.close()
        self._path.unlink(missing_ok=True)
