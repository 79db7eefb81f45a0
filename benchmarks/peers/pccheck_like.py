"""PCcheck's way (Strati et al., ASPLOS 2025, section 3), written by us from the paper: a baseline, not their code.

    save() ─► copy thread: state ─► chunks of a bounded pool of memory ─► p writer threads ─► slot of a
    preallocated file
                                                                          (O_DIRECT)     ─► fsync ─► commit record
                                                                          ─► fsync
    N checkpoints in flight in N + 1 slots; the update waits for the copy; a save waits while N are in flight

The pool is as large as one checkpoint, allocated and touched once. Only rank 0 saves, as in theirs. A slot's header has
the plain values and the tensors' places; the commit record names the newest complete slot.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.complete import IncompleteError, require_same
from benchmarks.peers.background import Background
from benchmarks.peers.flat_state import FlatState, pages, parsed
from benchmarks.workload import Workload

__all__ = ["PccheckLike"]

_CHUNK_BYTES = 16 << 20
_CHECKPOINTS_MAX = 2  # N
_WRITERS = 2  # p
_Write = tuple[
    int, int, int, Callable[[], None]
]  # chunk of the pool, file offset, bytes, callback when written


class PccheckLike:
    """N concurrent checkpoints, p writers, preallocated slots."""

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        self._workload, self._rank = workload, rank
        self._copied = Background()
        self._step = -1
        if rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._record = folder / "pccheck.slots", folder / "pccheck.commit"
        self._slot_bytes = FlatState(self._workload.state_dict()).room_bytes
        self._chunk_bytes = min(_CHUNK_BYTES, self._slot_bytes)
        chunks = -(-self._slot_bytes // self._chunk_bytes) + 1
        self._pool = mmap.mmap(-1, chunks * self._chunk_bytes)
        self._memory = torch.frombuffer(self._pool, dtype=torch.uint8)
        self._memory.zero_()
        self._free_chunks: queue.SimpleQueue[int] = queue.SimpleQueue()
        for chunk in range(chunks):
            self._free_chunks.put(chunk)
        self._free_slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(_CHECKPOINTS_MAX):
            self._free_slots.put(slot)
        self._spare = _CHECKPOINTS_MAX  # slot of the newest complete checkpoint, never written to
        self._fd = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_CLOEXEC, 0o600
        )
        os.posix_fallocate(self._fd, 0, (_CHECKPOINTS_MAX + 1) * self._slot_bytes)
        os.fsync(self._fd)
        self._lock = threading.Lock()
        self._under_way, self._newest = 0, -1
        self._problem: BaseException | None = None
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._write, daemon=True) for _ in range(_WRITERS)]
        for thread in self._threads:
            thread.start()

    # -- one checkpoint ----------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        self._step = step
        if self._rank:
            return
        self._copied.wait()
        slot = self._free_slots.get()  # waits while N are in flight
        with self._lock:
            self._under_way += 1
        state = FlatState(self._workload.state_dict())
        self._copied.start(lambda: self._copy(step, slot, state))

    def _copy(self, step: int, slot: int, state: FlatState) -> None:
        """Copy the state into chunks, and pass each full one to the writers."""
        lock, left = threading.Lock(), [1]  # outstanding work; 1 for the copy itself

        def written() -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            self._commit(step, slot, state.nbytes)

        def write(chunk: int, offset: int, length: int) -> None:
            with lock:
                left[0] += 1
            self._writes.put((chunk, offset, length, written))

        base, offset, used = slot * self._slot_bytes, 0, 0
        chunk = self._free_chunks.get()
        for part in state.parts():
            taken = 0
            while taken < part.numel():
                if used == self._chunk_bytes:
                    write(chunk, base + offset, used)
                    offset, used = offset + used, 0
                    chunk = self._free_chunks.get()
                count = min(self._chunk_bytes - used, part.numel() - taken)
                start = chunk * self._chunk_bytes + used
                self._memory[start : start + count].copy_(part[taken : taken + count])
                taken, used = taken + count, used + count
        write(chunk, base + offset, pages(used))
        written()

    def _write(self) -> None:
        view = memoryview(self._pool)
        while (write := self._writes.get()) is not None:
            chunk, offset, nbytes, written = write
            start = chunk * self._chunk_bytes
            try:
                if os.pwrite(self._fd, view[start : start + nbytes], offset) != nbytes:
                    raise OSError(f"{self._path}: short write at {offset}")
                self._free_chunks.put(chunk)
                written()
            except BaseException as error:  # noqa: BLE001 - raised by done()
                self._problem = error
        view.release()

    def _commit(self, step: int, slot: int, nbytes: int) -> None:
        """Sync a written checkpoint, then write its commit record, unless a newer checkpoint has one."""
        os.fsync(self._fd)
        with self._lock:
            free = slot
            if step > self._newest:
                record = {"step": step, "slot": slot, "nbytes": nbytes}
                with self._record.open("w") as file:
                    json.dump(record, file)
                    file.flush()
                    os.fsync(file.fileno())
                self._newest, free, self._spare = step, self._spare, slot
            self._under_way -= 1
        self._free_slots.put(free)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        self._copied.wait()

    def done(self) -> bool:
        if self._rank:
            return True
        if self._problem is not None:
            raise self._problem
        return self._copied.done() and self._under_way == 0

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        if self._rank:
            return 0
        record = json.loads(self._record.read_text())
        if record["step"] != self._step:
            raise IncompleteError(f"pccheck-like: the record names step {record['step']}, not {self._step}")
        data = memoryview(
            bytearray(record["nbytes"])
        )  # map only this slot: all slots would exceed the machine's memory
        with self._path.open("rb") as file:
            file.seek(record["slot"] * self._slot_bytes)
            file.readinto(data)
        return require_same(
            self._workload.state_dict(), parsed(data, what="pccheck-like"), what="pccheck-like"
        )

    def clean(self) -> None:
        """Do nothing: the preallocated slots stay."""

    def close(self) -> None:
        self._copied.wait()
        if self._rank:
            return
        for _ in self._threads:
            self._writes.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._fd)
        del self._memory
        self._pool.close()
        self._path.unlink(missing_ok=True)
        self._record.unlink(missing_ok=True)
