"""The room of a retired checkpoint: exact files in it, never a file that is still read, nothing left."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from holdfast.store import posix_io
from holdfast.store.posix import PosixStore
from holdfast.store.spare_room import writes_in_place

_PART_BYTES = 1 << 16
_HELD_BYTES = 100_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixStore]:
    if not writes_in_place(tmp_path):
        pytest.skip(f"{tmp_path} is not on ext4 or XFS: no room is used again there")
    opened = PosixStore(tmp_path / "run")
    yield opened
    opened.close()


def _put(store: PosixStore, name: str, nbytes: int, *, seed: int = 0) -> tuple[bytes, int]:
    """Publish a file; its bytes, and its inode."""
    memory = mmap.mmap(-1, nbytes + mmap.PAGESIZE)
    memory[:nbytes] = random.Random(f"{name} {seed}").randbytes(nbytes)
    image = memoryview(memory)[:nbytes]
    upload = store.begin(name, nbytes=nbytes, chunk_bytes=_PART_BYTES, write_id=f"w{seed}-{name}")
    for index in range(-(-nbytes // _PART_BYTES)):
        upload.write_part(index, [image[index * _PART_BYTES : (index + 1) * _PART_BYTES]], 0)
    upload.publish()
    return bytes(image), _path(store, name).stat().st_ino


def _path(store: PosixStore, name: str) -> Path:
    return Path(store.url) / name


def _hidden(store: PosixStore) -> list[Path]:
    return sorted((Path(store.url) / ".holdfast" / "tmp").iterdir())


@pytest.mark.parametrize(
    "nbytes", [1, 4095, 4096, _PART_BYTES + 1, 3 * _PART_BYTES - 5, 9 * _PART_BYTES + 777]
)
def test_the_next_file_has_the_room_and_nothing_of_the_old_bytes(store: PosixStore, nbytes: int) -> None:
    _, room = _put(store, "old", 3 * _PART_BYTES + 100)
    store.retire("old")
    assert not _path(store, "old").exists()
    image, inode = _put(store, "new", nbytes)
    assert inode == room
    assert _path(store, "new").read_bytes() == image
    assert _path(store, "new").stat().st_blocks * 512 <= nbytes + 2 * 4096, (
        "what it does not need is given back"
    )
    assert _hidden(store) == []


def test_a_file_in_spare_room_has_the_permissions_of_a_new_file(store: PosixStore) -> None:
    _put(store, "fresh", 5000)
    _, room = _put(store, "old", 5000)
    _path(store, "old").chmod(0o600)
    store.retire("old")
    assert _put(store, "new", 5000)[1] == room
    assert stat.S_IMODE(_path(store, "new").stat().st_mode) == stat.S_IMODE(
        _path(store, "fresh").stat().st_mode
    )


@contextmanager
def _open(path: Path) -> Iterator[Callable[[], bytes]]:
    with path.open("rb") as file:
        yield lambda: os.pread(file.fileno(), _HELD_BYTES, 0)


@contextmanager
def _mapped(path: Path) -> Iterator[Callable[[], bytes]]:
    """As `torch.load(mmap=True)` leaves it: the descriptor is closed."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with mapping:
        yield lambda: mapping[:]


@contextmanager
def _linked(path: Path) -> Iterator[Callable[[], bytes]]:
    other = path.with_name("kept-by-hand")
    other.hardlink_to(path)
    yield other.read_bytes


@contextmanager
def _elsewhere(path: Path) -> Iterator[Callable[[], bytes]]:
    """In another process."""
    code = "import sys; f = open(sys.argv[1], 'rb'); print(flush=True); input(); sys.stdout.buffer.write(f.read())"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        yield lambda: reader.communicate(b"\n")[0]


@pytest.mark.parametrize("held", [_open, _mapped, _linked, _elsewhere])
def test_a_file_that_somebody_has_stays_as_it_is_for_them(
    store: PosixStore, held: Callable[[Path], AbstractContextManager[Callable[[], bytes]]]
) -> None:
    old, room = _put(store, "old", _HELD_BYTES)
    with held(_path(store, "old")) as look:
        store.retire("old")
        assert not _path(store, "old").exists()
        new, inode = _put(store, "new", _HELD_BYTES)
        assert inode != room
        assert _path(store, "new").read_bytes() == new
        assert _hidden(store) == []
        assert look() == old


def test_spare_room_that_a_reader_opened_meanwhile_is_not_reused(store: PosixStore) -> None:
    """A backup that walks through everything, hidden files included."""
    old, room = _put(store, "old", 5000)
    store.retire("old")
    with _hidden(store)[0].open("rb") as backup:
        assert _put(store, "new", 5000)[1] != room
        assert backup.read() == old


def test_a_single_spare_file_is_kept_and_close_gives_it_back(store: PosixStore) -> None:
    rooms = [_put(store, name, 5000)[1] for name in ("a", "b")]
    store.retire("a")
    store.retire("b")
    assert [path.stat().st_ino for path in _hidden(store)] == rooms[1:]
    store.close()
    assert _hidden(store) == []
    store.retire("never was")
    assert _hidden(store) == []


def test_spare_room_that_a_sweep_took_is_not_missed(store: PosixStore) -> None:
    _put(store, "old", 5000)
    store.retire("old")
    assert len(store.sweep()) == 1
    image, _ = _put(store, "new", 5000)
    assert _path(store, "new").read_bytes() == image


def test_a_room_that_a_killed_process_kept_is_swept_by_the_next(store: PosixStore) -> None:
    _put(store, "old", 5000)
    store.retire("old")
    after = PosixStore(Path(store.url))
    assert len(after.sweep()) == 1
    assert _hidden(store) == []


def test_the_old_name_is_gone_durably_before_the_room_is_offered(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut may bring the name back with the bytes of another checkpoint under it."""
    _put(store, "old", 5000)
    calls, fsync, setlease = list[str](), os.fsync, fcntl.fcntl

    def noting_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        if path.is_dir():
            calls.append(f"sync {path.name}, old {'there' if _path(store, 'old').exists() else 'gone'}")
        fsync(descriptor)

    def noting_lease(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE and argument == fcntl.F_WRLCK:
            calls.append("asked who has it")
        return int(setlease(descriptor, command, argument))

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(fcntl, "fcntl", noting_lease)
    store.retire("old")
    _put(store, "new", 5000)
    assert calls[:3] == ["sync run, old gone", "sync tmp, old gone", "asked who has it"]


def test_room_that_is_there_is_not_asked_for_again(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk with less free than one checkpoint, keeping one and writing one must go on."""
    _, room = _put(store, "old", 10 * _PART_BYTES)
    store.retire("old")
    monkeypatch.setattr(posix_io, "free_bytes", lambda _path: _PART_BYTES)
    assert _put(store, "new", 11 * _PART_BYTES)[1] == room


def test_on_a_full_disk_the_room_gives_way_to_a_small_file(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(store, "old", 5000)
    store.retire("old")
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if any(path.name.startswith("spare") for path in _hidden(store)):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    store.write("manifest", b"{}")
    assert _path(store, "manifest").read_bytes() == b"{}"
    assert _hidden(store) == []


def test_where_files_are_not_written_in_place_they_are_deleted(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if writes_in_place(Path(folder)):
            pytest.skip("/dev/shm is on ext4 or XFS here")
        store = PosixStore(Path(folder))
        _put(store, "old", 5000)
        store.retire("old")
        assert not _path(store, "old").exists()
        assert _hidden(store) == []
