"""Links below a run are never followed: no file outside is written, removed, read or taken for the run's."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.checkpoints.lease import Lease
from holdfast.crc import crc32
from holdfast.errors import HoldfastError, StoreError, StoreMissing
from holdfast.store import posix, posix_io, posix_upload
from holdfast.store.base import InterruptedUpload
from holdfast.store.posix import PosixStore

DATA = b"x" * 5000


def uploaded(store: PosixStore, name: str = "step-000000001.pt") -> None:
    upload = store.begin(name, nbytes=len(DATA), chunk_bytes=8192, write_id="w1")
    upload.write_part(0, [memoryview(DATA)], crc32(DATA))
    upload.publish()


def resumed(store: PosixStore) -> None:
    store.resume("step-000000001.pt", InterruptedUpload(5000, 8192, "w1", "inode-1"))


ACTS: dict[str, Callable[[PosixStore], object]] = {
    "sweep": PosixStore.sweep,
    "write": lambda store: store.write("step-000000001.json", DATA),
    "create": lambda store: store.create("step-000000001.json", DATA),
    "upload": uploaded,
    "resume": resumed,
    "check": lambda store: store.check(write=True),
    "retire": lambda store: store.retire("step-000000009.pt"),
    "claim": Lease.acquire,
}
INSIDE: dict[str, Callable[[PosixStore], object]] = {
    "write": lambda store: store.write("slices/a", DATA),
    "create": lambda store: store.create("slices/a", DATA),
    "upload": lambda store: uploaded(store, "slices/a"),
    "delete": lambda store: store.delete("slices/kept"),
    "retire": lambda store: store.retire("slices/kept"),
    "read": lambda store: store.read("slices/kept"),
    "read_into": lambda store: store.read_into("slices/kept", 0, memoryview(bytearray(3))),
    "size": lambda store: store.size("slices/kept"),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Provide a directory outside the run."""
    place = tmp_path / "outside"
    (place / "tmp").mkdir(parents=True)
    for path in (place / "kept", place / "tmp" / "kept"):
        path.write_text("precious")
    return place


def seen(place: Path) -> dict[str, str]:
    return {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("link", [".holdfast", ".holdfast/tmp"])
def test_the_private_folder_as_a_link_is_refused_by_name(
    tmp_path: Path, outside: Path, link: str, act: str
) -> None:
    run = tmp_path / "run"
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(outside / "tmp" if link.endswith("tmp") else outside)
    (run / "step-000000009.pt").write_bytes(DATA)
    before = seen(outside)
    with pytest.raises(StoreError, match=r"\.holdfast.*symbolic link") as caught:
        ACTS[act](PosixStore(run))
    assert not caught.value.retriable
    assert seen(outside) == before
    assert (run / "step-000000009.pt").read_bytes() == DATA


@pytest.mark.parametrize("act", INSIDE)
def test_slices_as_a_link_are_refused_by_name(tmp_path: Path, outside: Path, act: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "slices").symlink_to(outside)
    before = seen(outside)
    with pytest.raises(StoreError, match=r"slices: is a symbolic link"):
        INSIDE[act](PosixStore(run))
    assert seen(outside) == before
    assert PosixStore(run).list() == []


@pytest.mark.parametrize("target", ["kept", "nothing there"])
def test_a_file_that_is_a_link_is_neither_listed_nor_read_nor_written_through(
    tmp_path: Path, outside: Path, target: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    link = run / "step-000000001.json"
    link.symlink_to(outside / target)
    store, before = PosixStore(run), seen(outside)
    assert store.list() == []
    for act in (store.read, store.size):
        with pytest.raises(StoreError, match=r"step-000000001\.json.*link") as caught:
            act(link.name)
        assert not isinstance(caught.value, StoreMissing), "it is there, and refused"
    with pytest.raises(StoreError, match="link"):
        store.read_into(link.name, 0, memoryview(bytearray(3)))
    assert not store.create(link.name, DATA)
    store.write(link.name, DATA)
    assert link.read_bytes() == DATA
    assert not link.is_symlink(), "the link was replaced, not what it leads to"
    assert seen(outside) == before


def test_a_link_at_the_temporary_name_is_not_written_through(tmp_path: Path, outside: Path) -> None:
    run = tmp_path / "run"
    (run / ".holdfast" / "tmp").mkdir(parents=True)
    (run / ".holdfast" / "tmp" / "w1-step-000000001.pt").symlink_to(outside / "kept")
    before = seen(outside)
    uploaded(PosixStore(run))
    assert (run / "step-000000001.pt").read_bytes() == DATA
    assert seen(outside) == before


LATE: dict[str, Callable[[PosixStore], object]] = {
    "write": lambda store: store.write("slices/kept", DATA),
    "create": lambda store: store.create("slices/new", DATA),
    "upload": lambda store: uploaded(store, "slices/new"),
    "delete": lambda store: store.delete("slices/kept"),
}


@pytest.mark.parametrize("act", LATE)
def test_a_directory_that_is_swapped_for_a_link_is_not_followed(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """The links were looked for, and then one comes: what follows is done in opened directories."""
    run, before = tmp_path / "run", seen(outside)
    (run / "slices").mkdir(parents=True)
    (run / "slices" / "kept").write_text("ours")
    real = posix_io.open_directory

    def swapped(root: Path, directory: Path) -> AbstractContextManager[int]:
        if directory == run / "slices" and not directory.is_symlink():
            directory.rename(run / "aside")
            directory.symlink_to(outside)
        return real(root, directory)

    for module in (posix, posix_upload):
        monkeypatch.setattr(module, "open_directory", swapped)
    with pytest.raises(StoreError, match=r"slices: is a symbolic link"):
        LATE[act](PosixStore(run))
    assert seen(outside) == before
    assert (run / "aside" / "kept").read_text() == "ours"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step-000000001.json")
    with pytest.raises(HoldfastError, match="regular"):
        PosixStore(tmp_path).read("step-000000001.json")
    with pytest.raises(HoldfastError, match="regular"):
        PosixStore(tmp_path).size("step-000000001.json")


def test_the_run_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large disk")
    store = PosixStore(tmp_path / "run")
    uploaded(store)
    assert [info.name for info in store.list()] == ["step-000000001.pt"]
