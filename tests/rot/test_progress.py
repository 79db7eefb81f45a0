"""A byte flips in the record of a flush: the damaged lines are ignored, and no part counts that was not written."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flusher.progress import Head, Progress
from holdfast.errors import ProtocolError
from tests.rot.flips import COUNT, flips

HEAD = Head(
    file="step-000000012.pt",
    write_id="a" * 32,
    token="4711",
    part_bytes=8192,
    layout_digest="0123456789abcdef" * 4,
)
PARTS = {part: ((part, 2**32 - 1 - part), (7,)) for part in (3, 0, 1, 4, 2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "flush-7-12"
    progress = Progress.begin(path, HEAD)
    for part, crcs in PARTS.items():
        progress.add_part(part, crcs)
    progress.add_published()
    return path


def test_progress_comes_back_as_it_was_written(path: Path) -> None:
    found = Progress.load(path)
    assert found is not None
    assert (found.head, found.parts, found.published) == (HEAD, PARTS, True)


def test_every_flip_takes_away_and_changes_nothing(path: Path) -> None:
    """The record is ignored from the damaged line on: those parts count as not written."""
    whole = path.read_bytes()
    order = list(PARTS)
    seen: Counter[int] = Counter()
    for flip in flips("record of a flush", len(whole)):
        path.write_bytes(flip.applied(whole))
        line = whole[: flip.offset].count(b"\n")
        found = Progress.load(path)
        if line == 0:
            assert found is None, "a head that is damaged names no upload"
        else:
            assert found is not None
            assert found.head == HEAD
            assert found.parts == {part: PARTS[part] for part in order[: line - 1]}
            assert not found.published
            assert path.read_bytes() == whole[: len(b"".join(whole.splitlines(keepends=True)[:line]))]
        seen[line] += 1
    assert seen.total() == COUNT
    assert set(seen) == set(range(len(PARTS) + 2)), "some line was never hit"


def test_every_truncation_takes_away_and_changes_nothing(path: Path) -> None:
    whole = path.read_bytes()
    for nbytes in range(len(whole)):
        path.write_bytes(whole[:nbytes])
        found = Progress.load(path)
        lines = whole[:nbytes].count(b"\n")
        assert (found is None) == (lines == 0)
        if found is not None:
            assert len(found.parts) == lines - 1
            found.add_part(9, ((1,),))
            again = Progress.load(path)
            assert again is not None
            assert again.parts == {**found.parts, 9: ((1,),)}, (
                "what is written next must begin on a line of its own"
            )


@given(noise=st.binary(max_size=300))
def test_noise_is_no_record(noise: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("noise") / "flush-7-12"
    path.touch(mode=0o600)
    path.write_bytes(noise)
    with contextlib.suppress(ProtocolError):
        assert Progress.load(path) is None
