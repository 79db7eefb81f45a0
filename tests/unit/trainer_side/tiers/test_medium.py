"""The media of slot files: each has a name and its own way to write."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from trainer_side.tiers import medium as media
from trainer_side.tiers.medium import CachedFile, DirectFile, MappedFile, Medium, PmFile, address_of

_BYTES = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.write_bytes(bytes(_BYTES))
    return path


def pages(nbytes: int, seed: int = 1) -> memoryview:
    memory = mmap.mmap(-1, nbytes)
    memory[:] = random.Random(seed).randbytes(nbytes)
    return memoryview(memory)


def check(medium: Medium, path: Path) -> None:
    first, second = pages(8192), pages(4096, 2)
    medium.write(4096, first)
    medium.write(_BYTES - 4096, second)
    medium.flush()
    assert medium.read(4096, 8192) == bytes(first)
    assert medium.read(_BYTES - 4096, 8192) == bytes(second)
    assert path.read_bytes()[4096:12288] == bytes(first)
    medium.close()
    medium.close()


@pytest.mark.parametrize("kind", [CachedFile, DirectFile, MappedFile, PmFile])
def test_a_medium_reads_what_it_wrote(kind: type[CachedFile | MappedFile], path: Path) -> None:
    check(kind(path), path)


@pytest.mark.parametrize("kind", [MappedFile, PmFile])
def test_memory_is_the_file(kind: type[MappedFile], path: Path) -> None:
    medium = kind(path)
    memory = medium.memory(8192, 4096)
    assert memory is not None
    memory[:5] = b"kelp!"
    medium.write(8192, memory)
    medium.flush()
    assert path.read_bytes()[8192:8197] == b"kelp!"
    source = pages(4096)
    assert medium.copy is not None
    medium.copy(address_of(memory), address_of(source), 4096)
    medium.write(8192, memory)
    medium.flush()
    assert path.read_bytes()[8192:12288] == bytes(source)
    medium.close()
    memory[:1] = b"x"  # it stays mapped as long as somebody holds it
    memory.release()


def test_whole_pages_go_past_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium = DirectFile(path)
    if "refuses" in medium.write_mode:
        pytest.skip("no O_DIRECT here")
    written: list[bool] = []
    real = os.pwrite

    def pwrite(file: int, *rest: object) -> int:
        import fcntl

        written.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        return real(file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", pwrite)
    medium.write(4096, pages(8192))
    medium.write(4096, pages(8192)[1:100])
    assert written == [True, False]
    assert medium.write_mode == "O_DIRECT, fdatasync"
    medium.close()


def test_a_file_system_that_refuses_direct_writes_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = DirectFile(path)
    direct, real = medium._direct, os.pwrite

    def pwrite(file: int, *rest: object) -> int:
        if file == direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", pwrite)
    check(medium, path)
    assert medium.write_mode == "page cache, fdatasync: the file system refuses O_DIRECT"


def test_a_device_that_fails_is_a_store_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for kind in (CachedFile, DirectFile):
        medium = kind(path)
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", fails)
            broken.setattr(os, "fdatasync", fails)
            with pytest.raises(StoreError, match=r"cannot write .*dmesg"):
                medium.write(0, pages(4096))
            with pytest.raises(StoreError, match="cannot flush"):
                medium.flush()
        medium.close()


def test_memory_without_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        MappedFile(tmp_path / "none")


# -- persistent memory --------------------------------------------------------------------------------------------


def test_no_dax_falls_back_to_msync_and_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PMEM_IS_PMEM_FORCE", raising=False)
    if media.load_libpmem() is None:
        monkeypatch.setattr(media, "load_libpmem", object)
    medium = PmFile(path)
    assert medium.write_mode == "msync: the file system has no DAX"
    assert f"{path}: the file system has no DAX; slices are kept there by an ordinary mapping" in caplog.text
    assert "On persistent memory, mount with -o dax" in caplog.text
    assert medium.copy is ctypes.memmove
    medium.close()


def test_no_libpmem_falls_back_to_msync_and_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(media, "load_libpmem", lambda: None)
    medium = PmFile(path)
    assert medium.write_mode == "msync: libpmem.so.1 is not installed"
    assert str(path) in caplog.text
    check(medium, path)


def test_the_library_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    media.load_libpmem.cache_clear()
    monkeypatch.setattr(media, "_LIBRARY", "libpmem-of-nobody.so.1")
    assert media.load_libpmem() is None
    media.load_libpmem.cache_clear()
    monkeypatch.setattr(media, "_LIBRARY", "libc.so.6")  # has none of the functions
    assert media.load_libpmem() is None
    media.load_libpmem.cache_clear()


@pytest.mark.skipif(media.load_libpmem() is None, reason="libpmem.so.1 is not installed (package libpmem1)")
class TestLibpmem:
    """The real library, on ordinary memory."""

    def test_a_stand_in_is_called_one(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PMEM_IS_PMEM_FORCE", "1")
        medium = PmFile(path)
        assert medium.write_mode == "libpmem, a stand-in: PMEM_IS_PMEM_FORCE=1 and no persistent memory"
        assert medium.copy not in (None, ctypes.memmove)
        check(medium, path)

    @pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 255, 257, 4096, 99_999])
    def test_copies_of_any_size_and_place(self, nbytes: int) -> None:
        pmem = media.load_libpmem()
        assert pmem is not None
        for shift in (0, 1, 17):
            to, source = mmap.mmap(-1, 1 << 17), pages(1 << 17, nbytes)
            address = address_of(memoryview(to))
            pmem.copy(address + 64 + shift, address_of(source) + shift, nbytes)
            pmem.persist(address, 1 << 17)
            pmem.drain()
            assert to[64 + shift : 64 + shift + nbytes] == bytes(source[shift : shift + nbytes])
            assert not any(to[: 64 + shift])
            assert not any(to[64 + shift + nbytes :])
            pmem.copy_past_caches(address, address_of(source), nbytes)
            assert to[:nbytes] == bytes(source[:nbytes])
