"""A ring read as files, in use or torn: the report is correct, and no file is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flusher.progress import Head, Progress, progress_path
from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.ring.ring import Ring
from operator_side.status.ring_files import RingFiles

CHUNK_BYTES = 4096


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring.create(tmp_path / "run", chunk_bytes=CHUNK_BYTES, ring_chunks=16, attempt=3)


def test_ring_files_tell_what_ring_and_store_have(ring: Ring) -> None:
    layout = Layout(9 * CHUNK_BYTES - 100, CHUNK_BYTES, 2, (), ())
    digest = ring.put_layout(layout)
    ring.write_checkpoint(3, 7, "receiving", digest, {})
    last = layout.chunks - 1
    for slot, chunk in enumerate((0, 1, 2, 4, last)):
        ring.mark_filling(slot, 3, 7, chunk)
        ring.mark_full(slot, [(0, 1)], layout.chunk_extent(chunk).nbytes)
    ring.mark_filling(9, 3, 7, 5)
    head = Head(
        file="step-000000007.pt", write_id="w", token="t", part_bytes=2 * CHUNK_BYTES, layout_digest=digest
    )
    progress = Progress.begin(progress_path(ring.directory, CheckpointId(3, 7)), head)
    progress.add_part(0, ((1,), (2,)))
    with progress_path(ring.directory, CheckpointId(3, 7)).open("ab") as file:
        file.write(b'00000000 {"part":1,"chunks":[[1],[2]]')  # killed while it wrote
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in ring.directory.iterdir()}
    found = RingFiles(ring.directory).snapshot()
    assert found is not None
    assert (found.attempt, found.ring_chunks, found.chunk_bytes) == (3, 16, CHUNK_BYTES)
    assert found.chunks == {"free": 10, "filling": 1, "full": 5}
    (one,) = found.checkpoints
    assert one.image_bytes == layout.image_bytes
    assert one.written_bytes == 2 * CHUNK_BYTES
    # Chunks 0 and 1 are written, and only not freed yet.
    assert one.ring_bytes == 2 * CHUNK_BYTES + layout.chunk_extent(last).nbytes
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in ring.directory.iterdir()} == before
    ring.close()


def test_ring_files_take_no_lock_that_looks_like_a_living_stager(ring: Ring) -> None:
    ring.hold(3)
    ring.release()
    files = RingFiles(ring.directory)
    locks = Path("/proc/locks").read_text().count(f"{os.getpid()} ")
    assert files.snapshot() is not None
    assert Path("/proc/locks").read_text().count(f"{os.getpid()} ") == locks
    assert not ring.is_held()
    ring.close()


def test_a_half_written_or_missing_ring_file_is_passed_over(ring: Ring, tmp_path: Path) -> None:
    files = RingFiles(ring.directory)
    ring.mark_filling(0, 3, 7, 0)
    ring.mark_full(0, [(0, 1)], 10)
    damaged = bytearray((ring.directory / "journal").read_bytes())
    damaged[4096 + 32] ^= 1
    (ring.directory / "journal").write_bytes(damaged)
    (ring.directory / "checkpoint-3-7.json").write_bytes(b"half")
    (ring.directory / "checkpoint-3-7.json").chmod(0o600)
    found = files.snapshot()
    assert found is not None
    assert found.chunks["full"] == 1
    assert found.checkpoints == ()
    assert "its CRC-32 is wrong" in found.trouble
    ring.close()
    Ring.remove(ring.directory)
    assert files.snapshot() is None
    ring.directory.rmdir()
    assert files.snapshot() is None
    assert RingFiles(tmp_path / "never").snapshot() is None


def test_a_journal_of_another_version_is_an_error(ring: Ring) -> None:
    raw = bytearray((ring.directory / "journal").read_bytes())
    raw[8] = 99
    (ring.directory / "journal").write_bytes(raw)
    with pytest.raises(ProtocolError, match="version 99"):
        RingFiles(ring.directory).snapshot()
    ring.close()
