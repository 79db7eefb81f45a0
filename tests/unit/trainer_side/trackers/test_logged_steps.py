"""Hand-made files of W&B's offline runs: records across blocks, and a tail cut by a kill."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer_side.trackers.wandb_tracker import _records, newest_logged_step

BLOCK = 32 << 10
HEADER = b":W&B\xb8\xee\x00"
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def _piece(kind: int, body: bytes) -> bytes:
    return struct.pack("<IHB", 0, len(body), kind) + body


def _file() -> tuple[bytes, list[bytes]]:
    """A short record, one over three blocks, a filled end of a block, and another short one."""
    data = bytearray(HEADER + _piece(WHOLE, b"one"))
    long = bytes(range(256)) * 300
    left = BLOCK - len(data) - 7
    pieces = [long[:left], long[left : left + BLOCK - 7], long[left + BLOCK - 7 :]]
    for kind, piece in zip((FIRST, MIDDLE, LAST), pieces, strict=True):
        data += _piece(kind, piece)
    fill = BLOCK - len(data) % BLOCK - 7 - 3
    data += _piece(WHOLE, b"x" * fill) + bytes(3)  # too little for a piece
    assert len(data) % BLOCK == 0
    data += _piece(WHOLE, b"end")
    return bytes(data), [b"one", long, b"x" * fill, b"end"]


def test_records_are_joined_from_their_pieces() -> None:
    data, records = _file()
    assert [*_records(data)] == records


def test_records_end_where_a_killed_process_has_cut_them() -> None:
    data, records = _file()
    assert [*_records(data[:-1])] == records[:-1]
    assert [*_records(data[: BLOCK + 100])] == records[:1]
    assert [*_records(data + bytes(40))] == records
    for size in range(len(HEADER) + 8):
        assert [*_records(data[:size])] == []
    assert [*_records(b"another file")] == []


def test_a_run_without_folders_of_attempts_before_has_no_steps(tmp_path: Path) -> None:
    own = tmp_path / "offline-run-2-abc" / "files"
    own.mkdir(parents=True)
    (own.parent / "run-abc.wandb").write_bytes(_file()[0])
    assert newest_logged_step(SimpleNamespace(id="abc", dir=str(own))) == -1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, before = tmp_path / "offline-run-2-abc" / "files", tmp_path / "offline-run-1-abc"
    own.mkdir(parents=True)
    (before / "run-abc.wandb").mkdir(parents=True)
    assert newest_logged_step(SimpleNamespace(id="abc", dir=str(own))) == -1
    assert "so steps in it may be logged twice: IsADirectoryError" in caplog.text
