"""Reads a ring's files, even without a live owner, and changes nothing.

    journal ─► chunks by state, bytes of each checkpoint in the ring
    checkpoint-… ─► receiving or staged, times of the ranks      layout-… ─► bytes of the image
    flush-… ─► bytes that the store has

The reader does not map the ring's bytes, repairs nothing, and takes no lock: the flusher would take the holder of a
lock for a live stager. The ring's owners keep writing meanwhile, so half-written records are skipped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holdfast.crc import crc32
from holdfast.errors import HoldfastError, ProtocolError
from holdfast.image.layout import Layout
from holdfast.ring.checkpoint_record import checkpoint_ids, read_checkpoint
from holdfast.ring.directory import check_private_directory, private_file
from holdfast.ring.journal import HEADER_BYTES, RECORD_BYTES, Journal, SlotState
from holdfast.ring.side_files import read_side_file, read_writers

_PART = re.compile(rb'[0-9a-f]{8} \{"part":(\d{1,19}),')
_PART_BYTES = re.compile(rb'"part_bytes":(\d{1,19})[,}]')
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class RingCheckpoint:
    attempt: int
    step: int
    state: Literal["receiving", "staged"]  # `staged`: complete in the ring or the store
    image_bytes: int | None  # size of the image; None: its layout is unreadable
    ring_bytes: int  # its bytes in FULL chunks of the ring that the store does not have yet
    written_bytes: int | None  # its bytes in the store; None: no record
    record: dict[str, Any]  # times of ranks and stager, once staged; untrusted input
    held: str = ""  # why it waits for the store, by the flusher; "" if it does not wait


@dataclass(frozen=True, slots=True)
class RingSnapshot:
    """The state of a ring at one moment."""

    attempt: int
    chunk_bytes: int
    ring_chunks: int
    chunks: dict[str, int]  # name of a state → number
    checkpoints: tuple[RingCheckpoint, ...]
    trouble: str = ""
    writers: int = 1  # number of flushers that write its oldest checkpoint


class RingFiles:
    """Reads a ring's files repeatedly, each layout once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._image_bytes: dict[str, int] = {}

    def snapshot(self) -> RingSnapshot | None:
        """Return the state of the ring now; None if there is no ring. Raises `ConfigError`: the directory belongs to
        others, or others may write to it; `ProtocolError`: the journal is damaged, or of another version.
        """
        try:
            check_private_directory(self._directory)
            with private_file(self._directory / "journal", os.O_RDONLY) as fd:
                nbytes = os.fstat(fd).st_size
                if nbytes == 0:
                    return None  # its owner is just creating it
                memory = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        with memory:
            journal = Journal(memory, self._directory)
            counts, full = _count(journal, memory)
        troubles: list[str] = []
        found: list[RingCheckpoint] = []
        for attempt, step in checkpoint_ids(self._directory):
            of_step = full.get((attempt, step), {})
            try:
                one = self._checkpoint(attempt, step, journal.header.chunk_bytes, of_step)
            except HoldfastError as error:
                troubles.append(str(error))
            else:
                found += [] if one is None else [one]
        return RingSnapshot(
            journal.header.attempt,
            journal.header.chunk_bytes,
            journal.ring_chunks,
            counts,
            tuple(found),
            "; ".join(troubles),
            read_writers(self._directory, found[0].attempt) if found else 1,
        )

    def _checkpoint(
        self, attempt: int, step: int, chunk_bytes: int, full: dict[int, int]
    ) -> RingCheckpoint | None:
        record = read_checkpoint(self._directory, attempt, step)
        if record is None:
            return None  # durable or given up since the directory was listed
        image_bytes = self._size(record.layout_digest)
        written_bytes, part_bytes, parts = self._written(attempt, step, image_bytes)
        # The ring still holds a chunk for a moment after its part was written.
        ring_bytes = sum(
            nbytes
            for chunk, nbytes in full.items()
            if not part_bytes or chunk * chunk_bytes // part_bytes not in parts
        )
        return RingCheckpoint(
            attempt, step, record.state, image_bytes, ring_bytes, written_bytes, record.record
        )

    def _size(self, digest: str) -> int | None:
        if digest not in self._image_bytes:
            path = self._directory / f"layout-{digest[:16]}"
            with contextlib.suppress(FileNotFoundError, ProtocolError):
                self._image_bytes[digest] = Layout.from_bytes(read_side_file(path)).image_bytes
        return self._image_bytes.get(digest)

    def _written(self, attempt: int, step: int, image_bytes: int | None) -> tuple[int | None, int, set[int]]:
        """Return the bytes in the store, the bytes per part, and the written parts, from the record in docs/ring.md."""
        try:
            data = read_side_file(self._directory / f"flush-{attempt}-{step}")
        except FileNotFoundError:
            return None, 0, set()
        lines = [line for line in data.split(b"\n")[:-1] if _has_valid_crc(line)]
        head = _PART_BYTES.search(lines[0]) if lines else None
        if head is None or image_bytes is None or int(head[1]) == 0:
            return None, 0, set()
        part_bytes = int(head[1])
        parts = {int(match[1]) for line in lines[1:] if (match := _PART.match(line))}
        written = sum(max(0, min(part_bytes, image_bytes - part * part_bytes)) for part in parts)
        return written, part_bytes, parts


def _has_valid_crc(line: bytes) -> bool:
    stated, _, body = line.partition(b" ")
    return stated == b"%08x" % crc32(body)


def _count(
    journal: Journal, memory: mmap.mmap
) -> tuple[dict[str, int], dict[tuple[int, int], dict[int, int]]]:
    """Return the number of chunks in each state, and for each checkpoint its FULL chunks and their bytes."""
    words_each = RECORD_BYTES // _WORD_BYTES
    # Skip the slots by which the ring may grow: reading them would allocate memory. Copy: a view keeps the map open.
    words = np.frombuffer(memory, "<u4", journal.ring_chunks * words_each, HEADER_BYTES)[::words_each].copy()
    counted = Counter(words.tolist())
    counts = {state.name.lower(): counted[state.value] for state in SlotState}
    full: dict[tuple[int, int], dict[int, int]] = {}
    for slot in np.flatnonzero(words == SlotState.FULL.value).tolist():
        with contextlib.suppress(ProtocolError):  # changed while it was read
            record = journal.record(slot)
            if record.state is SlotState.FULL:
                full.setdefault((record.attempt, record.step), {})[record.chunk] = record.nbytes
    return counts, full
