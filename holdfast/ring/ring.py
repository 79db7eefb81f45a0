"""The ring: a bounded pool of chunks in shared memory, owned by the flusher, filled by the stager, outliving both.

The flusher makes and removes a ring, and may add slots; a stager or a tool attaches. Nothing here locks: each slot
state has one writer. docs/ring.md lists the files of its directory.
"""

from __future__ import annotations

import bisect
import fcntl
import logging
import mmap
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from holdfast.errors import ConfigError, ProtocolError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.ring.checkpoint_record import (
    CheckpointRecord,
    checkpoint_ids,
    checkpoint_path,
    read_checkpoint,
)
from holdfast.ring.directory import (
    check_private_directory,
    make_private_directory,
    open_private_file,
    private_file,
)
from holdfast.ring.doubts import DOUBTS_NAME
from holdfast.ring.journal import RING_CHUNKS_MAX, Header, Journal, SlotRecord, SlotState
from holdfast.ring.pages import use_huge_pages
from holdfast.ring.proofs import PROOFS_NAME
from holdfast.ring.ring_keeper import SET_ASIDE_NAME
from holdfast.ring.side_files import read_side_file, read_writers, stager_lock_path, write_side_file

_log = logging.getLogger("holdfast.ring")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SPARE_BYTES = 16 << 20  # layouts and checkpoint files lie in the same memory


class Ring:
    """One run's ring, mapped into this process. Get one by `create` or `attach`. Any thread may use slots; one thread
    at a time may change a slot's state. `ring_chunks`: how many slots this process has mapped. `token`: random, in the
    stager's file, if this process is the stager that holds the ring: identifies this very ring.
    """

    def __init__(self, directory: Path, journal: mmap.mmap, ring_fd: int) -> None:
        self.directory = directory
        self._journal_map = journal
        self._journal = Journal(journal, directory)
        self.chunk_bytes, self.ring_chunks = self._journal.header.chunk_bytes, 0
        # One map from the start, and one for each growth since: a map that is in use cannot grow.
        self._first_slots: list[int] = []
        self._maps: list[tuple[mmap.mmap, memoryview]] = []
        self._map(ring_fd)
        # Kept: the file may be removed before this process learns that it has grown.
        self._ring_fd = os.dup(ring_fd)
        self._close_ring_fd = weakref.finalize(self, os.close, self._ring_fd)
        self._layouts: dict[str, Layout] = {}
        self._stager_fd = -1
        self.token = ""

    # -- create, attach, close -----------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, directory: Path, *, chunk_bytes: int, ring_chunks: int, attempt: int, room_chunks: int = 0
    ) -> Ring:
        """Make a new ring, all slots FREE, its memory touched. Flusher only. `chunk_bytes`: a multiple of 4096.
        `room_chunks`: how many slots it may grow to, if more than `ring_chunks`. Raises `ConfigError`: the directory is
        not private to this user or already holds a ring, or memory has too little room.
        """
        header = Header(chunk_bytes, ring_chunks, attempt).checked(f"new ring in {directory}")
        room = header._replace(ring_chunks=min(max(ring_chunks, room_chunks), RING_CHUNKS_MAX))
        make_private_directory(directory)
        _check_room(directory, header.ring_bytes + header.journal_bytes + _SPARE_BYTES)
        try:
            ring_fd = open_private_file(directory / "ring", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise ConfigError(
                f"{directory} already has a ring; end its flusher, or remove the directory"
            ) from None
        try:
            try:
                os.posix_fallocate(ring_fd, 0, header.ring_bytes)  # allocates now: no SIGBUS later
            except OSError as error:
                (directory / "ring").unlink()
                raise ConfigError(
                    f"{directory}: the ring needs {header.ring_bytes} bytes there: {error.strerror}; lower ring_bytes"
                ) from error
            with private_file(directory / "journal", os.O_RDWR | os.O_CREAT | os.O_TRUNC) as journal_fd:
                os.posix_fallocate(journal_fd, 0, header.journal_bytes)
                os.ftruncate(journal_fd, room.journal_bytes)
                journal = mmap.mmap(journal_fd, room.journal_bytes)
            Journal.write_header(journal, header)
            ring = cls(directory, journal, ring_fd)
            ring._write("identity", secrets.token_hex(16).encode())
            return ring
        finally:
            os.close(ring_fd)

    @classmethod
    def attach(cls, directory: Path) -> Ring:
        """Map a ring that a flusher made. For the stager, tools, and a flusher that takes over a dead one's ring.
        Raises `ConfigError`: directory or files are not private to this user, or there is no ring; `ProtocolError`: the
        journal is damaged.
        """
        try:
            check_private_directory(directory)
            with private_file(directory / "journal", os.O_RDWR) as journal_fd:
                nbytes = os.fstat(journal_fd).st_size
                if nbytes == 0:
                    raise ProtocolError(f"{directory / 'journal'}: the file is empty, expected a journal")
                journal = mmap.mmap(journal_fd, nbytes)
            with private_file(directory / "ring", os.O_RDWR) as ring_fd:
                return cls(directory, journal, ring_fd)
        except FileNotFoundError as error:
            raise ConfigError(
                f"no ring in {directory} ({error.filename} is missing); is its flusher running?"
            ) from error

    def _map(self, ring_fd: int) -> None:
        """Map the slots that the journal has and this process does not."""
        first, chunks = self.ring_chunks, self._journal.ring_chunks
        needed_bytes, found_bytes = chunks * self.chunk_bytes, os.fstat(ring_fd).st_size
        if found_bytes < needed_bytes:  # it may be longer, if a flusher died before `add_slots`
            raise ProtocolError(
                f"{self.directory / 'ring'}: {found_bytes} bytes, the journal says {needed_bytes}"
            )
        # Populated now: a first touch in the middle of a receive would run at a tenth of memory speed.
        flags, offset = mmap.MAP_SHARED | mmap.MAP_POPULATE, first * self.chunk_bytes
        mapped = mmap.mmap(ring_fd, needed_bytes - offset, flags=flags, offset=offset)
        self._first_slots.append(first)
        self._maps.append((mapped, memoryview(mapped)))
        self.ring_chunks = chunks

    # -- growing -------------------------------------------------------------------------------------------------

    @property
    def room_chunks(self) -> int:
        """How many slots the ring may grow to."""
        # A map must begin at such a multiple, as every chunk of the usual sizes does.
        grows = self.chunk_bytes % mmap.ALLOCATIONGRANULARITY == 0
        return self._journal.room_chunks if grows else self.ring_chunks

    def allocate(self, ring_chunks: int) -> None:
        """Take memory for `ring_chunks` slots; they are not part of the ring before `add_slots`. Flusher only, any
        thread. Raises `OSError`: too little memory.
        """
        header = self._journal.header._replace(ring_chunks=ring_chunks)
        with private_file(self.directory / "journal", os.O_RDWR) as journal_fd:
            os.posix_fallocate(journal_fd, 0, header.journal_bytes)  # allocates now: no SIGBUS later
        os.posix_fallocate(self._ring_fd, 0, header.ring_bytes)

    def add_slots(self, ring_chunks: int) -> None:
        """Grow to this many slots, all new ones FREE. Flusher only, in its loop; after `allocate`."""
        self._journal.add_slots(ring_chunks)
        self.refresh_slots()

    def refresh_slots(self) -> range:
        """Map the slots that the flusher has added since the last call, and return them. Raises `ProtocolError`."""
        first = self.ring_chunks
        self._journal.refresh_slots()
        if self._journal.ring_chunks > first:
            self._map(self._ring_fd)
        return range(first, self.ring_chunks)

    def use_huge_pages(self, ring_chunks: int, should_stop: Callable[[], bool]) -> int:
        """Move the ring into huge pages, from which direct writes are faster; return how many bytes are in them. Any
        thread. `ring_chunks`: how many slots have memory, including those that are not part of the ring yet.
        """
        return use_huge_pages(self._ring_fd, ring_chunks * self.chunk_bytes, should_stop)

    def close(self) -> None:
        """Unmap the ring, which itself stays. Views that are still referenced keep their memory."""
        self.release()
        self._close_ring_fd()  # once, even if called again
        for mapped, memory in self._maps:
            memory.release()
            try:
                mapped.close()
            except BufferError:
                _log.debug("slots of %s are still in use; unmapped when the last view goes", self.directory)
        self._journal_map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def remove(directory: Path, *, keep_doubts: bool = False) -> None:
        """Remove all that a ring put into `directory`, but not the directory. Flusher only. `keep_doubts`: leave the
        file of doubted steps, whose manifests are not marked yet.
        """
        kept = {DOUBTS_NAME} if keep_doubts else set()
        names = {"ring", "journal", "identity", SET_ASIDE_NAME, DOUBTS_NAME, PROOFS_NAME} - kept
        beginnings = ("checkpoint-", "flush-", "layout-", "sources-", "stager-", "writers-", ".new-")
        for path in directory.iterdir():
            if path.name in names or path.name.startswith(beginnings):
                path.unlink(missing_ok=True)

    # -- slots ---------------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """The attempt whose chunks may arrive."""
        return self._journal.header.attempt

    def set_attempt(self, attempt: int) -> None:
        """Change the attempt. Flusher only, between two stagers."""
        stager_lock_path(self.directory, self.attempt).unlink(missing_ok=True)
        self._journal.set_attempt(attempt)

    @property
    def identity(self) -> str:
        """The ring's 32 random hex digits; empty if they cannot be read."""
        try:
            return read_side_file(self.directory / "identity").decode("ascii", "replace")
        except (FileNotFoundError, ConfigError, ProtocolError):
            return ""

    def record_writers(self, attempt: int, writers: int) -> None:
        """Record how many flushers write the checkpoints of an attempt, before the first one begins. Flusher only."""
        wanted = {key.attempt for key in self.checkpoint_ids()}
        for path in self.directory.glob("writers-*"):
            if path.name.partition("-")[2] not in map(str, wanted):
                path.unlink(missing_ok=True)
        if writers > 1:
            self._write(f"writers-{attempt}", str(writers).encode())

    def writers(self, attempt: int) -> int:
        """Return how many flushers write the checkpoints of an attempt, even if the ring has another one by now."""
        return read_writers(self.directory, attempt)

    # -- who has it mapped ---------------------------------------------------------------------------------------

    def hold(self, attempt: int) -> None:
        """Lock the ring for the stager of this attempt, until `release` or the death of this process.

        A stager that hangs is as silent as a dead one, but may still write into its slots. The kernel tells them apart:
        it releases the lock of a dead process.
        """
        self.release()
        self._stager_fd = open_private_file(stager_lock_path(self.directory, attempt), os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._stager_fd, fcntl.LOCK_SH)
        self.token = secrets.token_hex(16)
        os.pwrite(self._stager_fd, self.token.encode(), 0)

    def release(self) -> None:
        """Release the lock of `hold`."""
        fd, self._stager_fd = self._stager_fd, -1
        if fd >= 0:
            os.close(fd)

    def is_held(self) -> bool:
        """Whether the stager of the ring's attempt is alive, as far as the kernel knows."""
        try:
            with private_file(stager_lock_path(self.directory, self.attempt), os.O_RDWR) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except (BlockingIOError, StoreError):
            return True  # also out of descriptors: a live stager may still write into its slots
        return False

    def slot_memory(self, slot: int) -> memoryview:
        """Return the `chunk_bytes` bytes of one slot: writable, page-aligned, shared with the other process."""
        if not 0 <= slot < self.ring_chunks:
            raise ProtocolError(
                f"{self.directory}: there is no slot {slot}, the ring has {self.ring_chunks} slots"
            )
        which = bisect.bisect_right(self._first_slots, slot) - 1
        begin = (slot - self._first_slots[which]) * self.chunk_bytes
        return self._maps[which][1][begin : begin + self.chunk_bytes]

    def mark_filling(self, slot: int, attempt: int, step: int, chunk: int) -> None:
        """FREE → FILLING. Stager only; before the first byte may arrive."""
        self._journal.mark_filling(slot, attempt, step, chunk)

    def mark_full(self, slot: int, sources: Sequence[tuple[int, int]], nbytes: int) -> None:
        """FILLING → FULL with each sender's `(rank, crc32)`. Stager only; after the last byte."""
        self._journal.mark_full(slot, sources, nbytes)

    def free(self, slot: int) -> None:
        """FULL → FREE (flusher), FILLING → FREE (stager; the flusher once the stager is gone)."""
        self._journal.free(slot)

    def state(self, slot: int) -> SlotState:
        """Read the state of one slot, cheaply."""
        return self._journal.state(slot)

    def record(self, slot: int) -> SlotRecord:
        """Return the record of one slot. Raises `ProtocolError` if it is damaged, naming file, record and field."""
        return self._journal.record(slot)

    def remains(self) -> list[SlotRecord]:
        """Return every chunk that can still be read, in slots that are FULL, or FREE and not refilled. Stager only."""
        found = (self._journal.remains(slot) for slot in range(self.ring_chunks))
        return [record for record in found if record is not None]

    def remains_in(self, slot: int) -> SlotRecord | None:
        """Like `remains`, for one slot; None without a whole chunk. Stager only."""
        return self._journal.remains(slot)

    def records(self) -> list[SlotRecord]:
        return [self.record(slot) for slot in range(self.ring_chunks)]

    # -- checkpoints and layouts ---------------------------------------------------------------------------------

    def write_checkpoint(
        self,
        attempt: int,
        step: int,
        state: Literal["receiving", "staged"],
        layout_digest: str,
        record: Mapping[str, Any],
    ) -> None:
        """Replace the record of a checkpoint whole. Stager only."""
        document = CheckpointRecord(
            attempt=attempt, step=step, state=state, layout_digest=layout_digest, record=dict(record)
        )
        self._write(checkpoint_path(self.directory, attempt, step).name, document.to_bytes())

    def checkpoint(self, attempt: int, step: int) -> CheckpointRecord | None:
        """Return the record of one checkpoint, or None. Raises `ProtocolError` if its file is damaged."""
        return read_checkpoint(self.directory, attempt, step)

    def checkpoint_ids(self) -> list[CheckpointId]:
        """Return the ids of all checkpoint files, oldest first; [] once the flusher has removed the ring."""
        return checkpoint_ids(self.directory)

    def has_progress(self, attempt: int, step: int) -> bool:
        """Whether the flusher keeps a record of the parts of this checkpoint in the store."""
        return (self.directory / f"flush-{attempt}-{step}").exists()

    def remove_checkpoint(self, attempt: int, step: int) -> None:
        """Forget a checkpoint that is durable or given up; an unknown one is ignored."""
        checkpoint_path(self.directory, attempt, step).unlink(missing_ok=True)
        # Last: a staged checkpoint without its record would look as if chunks had been lost.
        (self.directory / f"flush-{attempt}-{step}").unlink(missing_ok=True)

    def put_layout(self, layout: Layout) -> str:
        """Write a layout beside the ring, before the first checkpoint that uses it; return its digest. Raises
        `ProtocolError` if its chunk size is not the ring's.
        """
        self._check_layout(layout, "new layout")
        name = f"layout-{layout.digest[:16]}"
        if not (self.directory / name).exists():
            self._write(name, layout.to_bytes())
        self._layouts[layout.digest] = layout
        return layout.digest

    def layout(self, digest: str) -> Layout:
        """Return the layout of a digest. Raises `ProtocolError` if it is missing, unreadable, or another one."""
        if digest not in self._layouts:
            if not _DIGEST.fullmatch(digest):
                raise ProtocolError(
                    f"{self.directory}: layout digest {digest!r:.100}, expected 64 hex digits"
                )
            path = self.directory / f"layout-{digest[:16]}"
            try:
                layout = Layout.from_bytes(read_side_file(path))
            except FileNotFoundError:
                raise ProtocolError(f"{path}: the file is missing, but a checkpoint names it") from None
            if layout.digest != digest:
                raise ProtocolError(f"{path}: digest {layout.digest}, expected {digest}")
            self._check_layout(layout, str(path))
            self._layouts[digest] = layout
        return self._layouts[digest]

    def _check_layout(self, layout: Layout, source: str) -> None:
        if layout.chunk_bytes != self.chunk_bytes:
            raise ProtocolError(
                f"{source}: chunk_bytes of the layout is {layout.chunk_bytes}, the ring has {self.chunk_bytes}"
            )

    def _write(self, name: str, data: bytes) -> None:  # the simulation forbids it to dead processes
        write_side_file(self.directory / name, data)


def _check_room(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{directory}: the ring needs {needed_bytes} bytes of memory there, {free_bytes} bytes are free; lower "
            "ring_bytes, make room, or give the container more shared memory (--shm-size)"
        )
