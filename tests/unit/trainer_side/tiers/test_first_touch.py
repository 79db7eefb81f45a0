"""Several threads touch large memory at once; where they cannot, the errors are as before."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.store.file_system import IN_MEMORY, file_system_of
from holdfast.store.posix_io import reserve
from trainer_side.tiers import first_touch
from trainer_side.tiers.first_touch import can_populate, fill_file, populate
from trainer_side.tiers.medium import MappedFile

PAGE_BYTES = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not can_populate(), reason="a kernel before 5.14")


@pytest.fixture(autouse=True)
def small_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_touch, "_SECTION_BYTES", 16 * PAGE_BYTES)
    monkeypatch.setattr(first_touch, "cores_of_rank", lambda: 4)


def answering(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, int], int]
) -> list[tuple[int, int, int, str]]:
    """Each call of the kernel, with its thread, is answered with `answer(its number, advice)`."""
    calls: list[tuple[int, int, int, str]] = []

    def advise(address: int, nbytes: int, advice: int) -> int:
        calls.append((address, nbytes, advice, threading.current_thread().name))
        return answer(len(calls), advice)

    monkeypatch.setattr(first_touch, "_advise", advise)
    return calls


def resident(address: int, nbytes: int) -> int:
    pages = nbytes // PAGE_BYTES
    seen = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), seen) == 0
    return sum(page & 1 for page in seen)


def test_all_pages_are_there_afterwards() -> None:
    memory = mmap.mmap(-1, 100 * PAGE_BYTES)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    assert resident(address, len(memory)) == 0
    assert populate(address, len(memory))
    assert resident(address, len(memory)) == 100


def test_several_threads_are_at_it_at_once_and_each_byte_is_touched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(4, timeout=60)

    def answer(number: int, _advice: int) -> int:
        if number <= 4:
            together.wait()
        return 0

    calls = answering(monkeypatch, answer)
    nbytes = 10 * 16 * PAGE_BYTES + 1
    assert populate(0, nbytes)
    assert len({thread for *_, thread in calls}) == 4
    spans = sorted((begin, length) for begin, length, *_ in calls)
    assert [begin for begin, _ in spans] == [*range(0, nbytes, 16 * PAGE_BYTES)]
    assert sum(length for _, length in spans) == nbytes


def test_an_interrupted_populate_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answering(monkeypatch, lambda number, _: errno.EINTR if number == 1 else 0)
    assert populate(0, PAGE_BYTES)
    assert len(calls) == 2


@pytest.mark.parametrize("sections", [1, 5])
def test_an_error_is_raised_when_no_thread_is_at_it_any_more(
    sections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = set(threading.enumerate())
    answering(monkeypatch, lambda number, _: errno.ENOMEM if number == 1 else 0)
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        populate(0, sections * 16 * PAGE_BYTES)
    assert not [one for one in set(threading.enumerate()) - running if one.name.startswith("holdfast-touch")]


def test_a_new_file_in_memory_has_all_its_pages_and_reserving_it_finds_nothing_to_do(tmpfs: Path) -> None:
    path, nbytes = tmpfs / "slots", 100 * PAGE_BYTES
    with path.open("x+b") as file:
        fill_file(file.fileno(), path, nbytes)
        assert os.fstat(file.fileno()).st_blocks * 512 == nbytes
        reserve(file.fileno(), path, nbytes)
        assert os.fstat(file.fileno()).st_size == nbytes
    assert path.read_bytes() == bytes(nbytes)


def test_a_file_on_a_disk_and_an_older_kernel_are_left_to_reserve(
    tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file_system_of(tmp_path) in IN_MEMORY:
        pytest.skip(f"{tmp_path} is in memory here")
    for folder, can in ((tmp_path, True), (tmpfs, False)):
        monkeypatch.setattr(first_touch, "can_populate", lambda can=can: can)
        with (folder / "slots").open("x+b") as file:
            fill_file(file.fileno(), folder / "slots", 100 * PAGE_BYTES)
            assert os.fstat(file.fileno()).st_size == 0


def test_a_mapped_file_is_not_marked_as_changed_by_its_first_touch(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk all of it would be written back."""
    (tmpfs / "slots").write_bytes(bytes(PAGE_BYTES))
    calls = answering(monkeypatch, lambda *_: 0)
    MappedFile(tmpfs / "slots").close()
    assert [advice for _, _, advice, _ in calls] == [22]


def test_on_an_older_kernel_a_mapping_is_populated_when_it_is_made(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 100 * PAGE_BYTES
    (tmpfs / "slots").write_bytes(bytes(nbytes))
    monkeypatch.setattr("trainer_side.tiers.medium.can_populate", lambda: False)
    monkeypatch.setattr(first_touch, "can_populate", lambda: False)
    medium = MappedFile(tmpfs / "slots")
    mapped = next(
        block
        for block in Path("/proc/self/smaps").read_text().split("VmFlags")
        if str(tmpfs / "slots") in block
    )
    assert f" {nbytes // 1024} " in next(line for line in mapped.splitlines() if line.startswith("Rss:"))
    medium.close()
