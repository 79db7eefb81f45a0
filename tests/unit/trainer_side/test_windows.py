"""Runs cover each chunk exactly; parts cover each entry exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.manifest import EntryRecord, Manifest
from tests.support.checkpoints import manifest_of, zip_image
from trainer_side import windows
from trainer_side.windows import Run, Windows

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


def all_runs(of: Windows, described: Manifest) -> list[Run]:
    chunks = -(-described.image_bytes // described.chunk_bytes)
    return [run for chunk in range(chunks) for run in of.runs(chunk)]


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "RUN_BYTES", run_bytes)
        of = Windows(described, range(len(described.entries)))
        runs = all_runs(of, described)
    position = 0
    for run in runs:
        assert run.offset == position
        assert run.nbytes > 0
        assert run.direct or run.nbytes <= run_bytes
        position += run.nbytes
    assert position == described.image_bytes
    reached = [0] * len(described.entries)
    for run in runs:
        for part in run.parts:
            entry = described.entries[part.entry]
            assert part.inside == reached[part.entry]
            assert part.offset == entry.offset + part.inside
            assert run.offset <= part.offset
            assert part.end <= run.offset + run.nbytes
            assert not run.direct or (part.offset, part.nbytes) == (run.offset, run.nbytes)
            reached[part.entry] += part.nbytes
    assert reached == [entry.nbytes for entry in described.entries]


def test_large_parts_are_read_directly_and_small_ones_together() -> None:
    described = manifest(100, [(10, 5), (3, 200), (1, 20), (2, 20)])
    of = Windows(described, range(4))
    assert [(run.offset, run.nbytes, run.direct, len(run.parts)) for run in all_runs(of, described)] == [
        (0, 18, False, 1),
        (18, 82, True, 1),
        (100, 100, True, 1),
        (200, 62, False, 3),
    ]


def test_entries_that_nobody_wants_are_literals() -> None:
    described = manifest(100, [(0, 100), (0, 100)])
    runs = all_runs(Windows(described, [1]), described)
    assert [(run.offset, run.nbytes, run.direct) for run in runs] == [
        (0, 100, False),
        (100, 100, True),
        (200, 1, False),
    ]
