"""Reads past the page cache: which bytes and flags, and the fallback for file systems that refuse them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import DamageError
from holdfast.store.posix import PosixStore
from holdfast.store.posix_io import PAGE_BYTES, OpenFile, read_fully

_FILE_BYTES = 5 * PAGE_BYTES + 123


@pytest.fixture
def image(tmp_path: Path) -> bytes:
    data = os.urandom(_FILE_BYTES)
    (tmp_path / "file").write_bytes(data)
    return data


class Reads:
    """Records `(direct, nbytes)` of each read of the kernel, and may refuse direct ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refused: str = "") -> None:
        self.made: list[tuple[bool, int]] = []
        genuine_open, genuine_read = os.open, os.preadv

        def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if refused == "open" and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return genuine_open(path, flags, *rest, **options)

        def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
            if refused == "read" and direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            self.made.append((direct, sum(buffer.nbytes for buffer in buffers)))
            return genuine_read(descriptor, buffers, offset)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "preadv", read)


def aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))[:nbytes]


def test_whole_pages_are_read_directly_and_the_rest_by_the_cache(
    tmp_path: Path, image: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, reads = aligned(_FILE_BYTES), Reads(monkeypatch)
    assert read_fully(tmp_path / "file", 0, view) == _FILE_BYTES
    assert bytes(view) == image
    assert reads.made == [(True, 5 * PAGE_BYTES), (False, 123)]


@pytest.mark.parametrize(("offset", "shift"), [(1, 0), (0, 64), (512, 512)])
def test_unaligned_reads_go_through_the_cache(
    tmp_path: Path, image: bytes, monkeypatch: pytest.MonkeyPatch, offset: int, shift: int
) -> None:
    view, reads = aligned(3 * PAGE_BYTES)[shift : shift + 2 * PAGE_BYTES], Reads(monkeypatch)
    assert read_fully(tmp_path / "file", offset, view) == view.nbytes
    assert bytes(view) == image[offset : offset + view.nbytes]
    assert not any(direct for direct, _ in reads.made)


@pytest.mark.parametrize("refused", ["open", "read"])
def test_a_file_system_that_cannot_is_read_by_the_cache(
    tmp_path: Path, image: bytes, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    view, reads = aligned(_FILE_BYTES), Reads(monkeypatch, refused=refused)
    assert read_fully(tmp_path / "file", 0, view) == _FILE_BYTES
    assert bytes(view) == image
    assert reads.made == [(False, _FILE_BYTES)]


@pytest.mark.parametrize("cut_bytes", [0, 1, PAGE_BYTES, 2 * PAGE_BYTES + 7, 3 * PAGE_BYTES - 1])
def test_a_short_file_is_damage_wherever_it_ends(tmp_path: Path, image: bytes, cut_bytes: int) -> None:
    (tmp_path / "file").write_bytes(image[:cut_bytes])
    with pytest.raises(DamageError, match=f"ends at byte {cut_bytes}; it is truncated"):
        PosixStore(tmp_path).read_into("file", 0, aligned(3 * PAGE_BYTES))


def test_no_descriptor_stays_open(tmp_path: Path, image: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        PosixStore(tmp_path).read_into("file", 0, aligned(len(image)))
        with pytest.raises(DamageError):
            PosixStore(tmp_path).read_into("file", PAGE_BYTES, aligned(len(image)))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_an_open_file_is_the_same_one_although_its_name_goes_and_is_closed_with_its_last_reader(
    tmp_path: Path, image: bytes
) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    read = OpenFile(tmp_path / "file").read
    (tmp_path / "file").unlink()
    for offset in (0, 1, PAGE_BYTES, _FILE_BYTES - 1):
        view = aligned(PAGE_BYTES)
        count = read(offset, view)
        assert bytes(view[:count]) == image[offset : offset + PAGE_BYTES]
    del read
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
