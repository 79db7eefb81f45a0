"""A window of memory: zero, writable, and aligned for direct reads."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import tempfile
from pathlib import Path

import pytest

from holdfast.ring.pages import aligned_buffer, use_huge_pages

_PAGE_BYTES, _HUGE_BYTES = 4096, 2 << 20


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


@pytest.mark.parametrize("nbytes", [1, 5000, _HUGE_BYTES - 1, _HUGE_BYTES, 2 * _HUGE_BYTES + 5000])
def test_a_window_is_zero_and_holds_what_is_written_from_first_to_last_byte(nbytes: int) -> None:
    view = aligned_buffer(nbytes)
    assert (view.nbytes, view.format) == (nbytes, "B")
    assert not any(view)
    view[:] = b"\x07" * nbytes
    assert bytes(view) == b"\x07" * nbytes


@pytest.mark.parametrize("nbytes", [1, 5000, _HUGE_BYTES, 2 * _HUGE_BYTES + 5000])
def test_a_window_begins_at_a_page_and_a_large_one_at_a_huge_page(nbytes: int) -> None:
    address = _address(aligned_buffer(nbytes))
    assert address % (_PAGE_BYTES if nbytes < _HUGE_BYTES else _HUGE_BYTES) == 0


@pytest.mark.parametrize("nbytes", [5000, 2 * _HUGE_BYTES, 2 * _HUGE_BYTES + 5000])
def test_no_more_of_it_is_resident_than_was_asked_for(nbytes: int) -> None:
    view = aligned_buffer(nbytes)
    view[:] = bytes(nbytes)
    memory = view.obj
    assert isinstance(memory, mmap.mmap)
    pages = (ctypes.c_ubyte * -(-len(memory) // _PAGE_BYTES))()
    begin = ctypes.c_void_p(_address(memoryview(memory)))
    assert ctypes.CDLL(None, use_errno=True).mincore(begin, ctypes.c_size_t(len(memory)), pages) == 0
    assert sum(page & 1 for page in pages) == -(-nbytes // _PAGE_BYTES)


def test_whole_huge_pages_are_what_the_kernel_gives() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel gives no huge pages")
    view = aligned_buffer(2 * _HUGE_BYTES + 5000)
    view[:] = bytes(view.nbytes)
    assert _huge_bytes(_address(view)) >= 2 * _HUGE_BYTES


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("holdfast.ring.pages.mmap.mmap", Plain)
    assert not any(aligned_buffer(_HUGE_BYTES))


def _huge_bytes(address: int) -> int:
    """For the mapping that has this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begins = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if begins:
            inside = int(begins[1], 16) <= address < int(begins[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def test_a_file_in_shared_memory_keeps_its_bytes_in_huge_pages_while_it_is_used() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    nbytes = 4 * _HUGE_BYTES + 5000
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(os.urandom(nbytes))
        file.flush()
        with mmap.mmap(file.fileno(), nbytes) as used:
            before = bytes(used)
            moved_bytes = use_huge_pages(file.fileno(), nbytes, lambda: False)
            assert used[:] == before
            used[_HUGE_BYTES] ^= 0xFF
            file.seek(_HUGE_BYTES)
            assert file.read(1)[0] == before[_HUGE_BYTES] ^ 0xFF
            assert moved_bytes % _HUGE_BYTES == 0
            assert moved_bytes <= 4 * _HUGE_BYTES
            if not moved_bytes:
                pytest.skip("this kernel gives shared memory no huge pages (Linux 6.1)")


def test_a_process_that_uses_the_file_meanwhile_never_counts_it_twice() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    nbytes = 16 * _HUGE_BYTES
    resident: list[int] = []
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        with mmap.mmap(file.fileno(), nbytes) as used:

            def use() -> bool:
                assert not any(used[::_PAGE_BYTES])
                fields = Path("/proc/self/status").read_text()
                resident.extend(int(kib) * 1024 for kib in re.findall(r"RssShmem:\s+(\d+)", fields))
                return False

            use()
            use_huge_pages(file.fileno(), nbytes, use)
    assert len(resident) > 8
    assert max(resident) <= resident[0] + 2 * _HUGE_BYTES


def test_moving_into_huge_pages_ends_when_told_to() -> None:
    asked: list[None] = []

    def after_two() -> bool:
        asked.append(None)
        return len(asked) > 2

    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(6 * _HUGE_BYTES))
        file.flush()
        assert use_huge_pages(file.fileno(), 6 * _HUGE_BYTES, after_two) <= 2 * _HUGE_BYTES
        assert len(asked) == 3


def test_where_there_are_none_nothing_is_done(tmp_path: Path) -> None:
    with (tmp_path / "ordinary").open("w+b") as file:
        file.write(b"x" * _HUGE_BYTES)
        file.flush()
        assert use_huge_pages(file.fileno(), 5000, lambda: False) == 0
        use_huge_pages(file.fileno(), _HUGE_BYTES, lambda: False)
        file.seek(0)
        assert file.read() == b"x" * _HUGE_BYTES
