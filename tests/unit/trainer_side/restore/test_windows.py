"""Runs cover each chunk exactly; parts cover each entry exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.image.entries import Extent
from holdfast.image.manifest import EntryRecord, Manifest
from tests.support.checkpoints import manifest_of, zip_image
from trainer_side.restore.targets import ChunkWindows, ReadRun

BASE = manifest_of(zip_image({"data.pkl": b""}), step=0)


def manifest(chunk_bytes: int, gaps_and_sizes: list[tuple[int, int]], tail_bytes: int = 1) -> Manifest:
    entries, position = [], 0
    for number, (gap, nbytes) in enumerate(gaps_and_sizes):
        entries.append(
            EntryRecord(name=f"archive/data/{number}", offset=position + gap, nbytes=nbytes, crc32=0)
        )
        position += gap + nbytes
    return BASE.model_copy(
        update={"chunk_bytes": chunk_bytes, "image_bytes": position + tail_bytes, "entries": tuple(entries)}
    )


def all_runs(of: ChunkWindows, described: Manifest, run_bytes: int = 16 << 20) -> list[ReadRun]:
    size = described.chunk_bytes
    begins = range(0, described.image_bytes, size)
    extents = [Extent(begin, min(size, described.image_bytes - begin)) for begin in begins]
    return [run for extent in extents for run in of.runs([extent], extent.offset, run_bytes)]


@given(
    chunk_bytes=st.integers(1, 40),
    entries=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 100)), max_size=12),
    tail_bytes=st.integers(1, 50),
    run_bytes=st.integers(1, 30),
)
def test_every_byte_is_asked_for_once_and_lands_once(
    chunk_bytes: int, entries: list[tuple[int, int]], tail_bytes: int, run_bytes: int
) -> None:
    described = manifest(chunk_bytes, entries, tail_bytes)
    runs = all_runs(ChunkWindows(described, range(len(described.entries))), described, run_bytes)
    position = 0
    for run in runs:
        assert run.offset == position
        assert 0 < run.nbytes <= run_bytes
        position += run.nbytes
    assert position == described.image_bytes
    reached = [0] * len(described.entries)
    for run in runs:
        for part in run.parts:
            entry = described.entries[part.entry]
            assert part.entry_offset == reached[part.entry]
            assert part.offset == entry.offset + part.entry_offset
            assert run.offset <= part.offset
            assert part.offset + part.nbytes <= run.offset + run.nbytes
            reached[part.entry] += part.nbytes
    assert reached == [entry.nbytes for entry in described.entries]


def test_a_chunk_is_one_request_whatever_lies_in_it() -> None:
    described = manifest(100, [(10, 5), (3, 200), (1, 20), (2, 20)])
    of = ChunkWindows(described, range(4))
    assert [(run.offset, run.nbytes, len(run.parts)) for run in all_runs(of, described)] == [
        (0, 100, 2),
        (100, 100, 1),
        (200, 62, 3),
    ]


def test_runs_begin_where_pages_begin() -> None:
    """However the tensors lie: only such a read goes past the page cache."""
    described = manifest(40 << 20, [(100, 30 << 20), (64, 3), (64, 70 << 20)])
    runs = all_runs(ChunkWindows(described, range(3)), described)
    assert [run.offset % 4096 for run in runs] == [0] * len(runs)
    assert len(runs) == 3 + 3 + 2


def test_entries_that_nobody_wants_have_no_parts() -> None:
    described = manifest(100, [(0, 100), (0, 100)])
    runs = all_runs(ChunkWindows(described, [1]), described)
    assert [(run.offset, run.nbytes, len(run.parts)) for run in runs] == [
        (0, 100, 0),
        (100, 100, 1),
        (200, 1, 0),
    ]
