"""Directories as stores: durability by order of calls, refusals with numbers, and files of other writers."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreError, StoreMissing
from holdfast.store.posix import PosixStore


def test_a_small_file_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """write, fsync of the file, rename, fsync of the directory: any other order loses files when the power goes."""
    store, calls = PosixStore(tmp_path), list[str]()
    store.write("warm-up", b"x")
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor: int) -> None:
        calls.append("fsync directory" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "fsync file")
        fsync(descriptor)

    def noting_rename(*names: str, **directories: Any) -> None:
        calls.append("rename")
        rename(*names, **directories)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    store.write("name", b"data")
    assert calls == ["fsync file", "rename", "fsync directory"]


def test_a_directory_that_cannot_be_made_is_refused_by_the_check() -> None:
    with pytest.raises(StoreError, match=r"/proc/.*choose another") as caught:
        PosixStore(Path("/proc/holdfast-run")).check(write=True)
    assert not caught.value.retriable


def test_a_read_only_place_is_refused_by_the_check() -> None:
    with pytest.raises(StoreError, match="/sys/kernel/holdfast-run") as caught:
        PosixStore(Path("/sys/kernel/holdfast-run")).check(write=True)
    assert not caught.value.retriable


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    store = PosixStore(tmp_path / "run")
    for call in (
        lambda: store.check(write=True),
        lambda: store.check(write=False),
        store.list,
        lambda: store.write("a", b"x"),
        lambda: store.begin("a", nbytes=1, chunk_bytes=4096, write_id="w"),
    ):
        with pytest.raises(StoreError, match="run") as caught:
            call()
        assert not caught.value.retriable
    assert (tmp_path / "run").read_text() == "in the way"


@pytest.mark.parametrize(
    ("number", "retriable"),
    [
        (errno.EIO, True),
        (errno.ESTALE, True),
        (errno.ETIMEDOUT, True),
        (errno.EACCES, False),
        (errno.EROFS, False),
        (errno.ENOSPC, False),
        (errno.EDQUOT, False),
    ],
)
def test_each_error_says_whether_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, retriable: bool
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreError, match=str(tmp_path)) as caught:
        PosixStore(tmp_path).write("name", b"1234567")
    assert caught.value.retriable is retriable
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert "7 bytes are needed" in str(caught.value)
        assert "free" in str(caught.value)
    assert list((tmp_path / ".holdfast/tmp").iterdir()) == []
    assert PosixStore(tmp_path).list() == []


def test_a_temporary_file_swept_by_another_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PosixStore(tmp_path)
    rename = os.rename

    def swept(source: str, target: str, **directories: Any) -> None:
        os.unlink(source, dir_fd=directories["src_dir_fd"])
        rename(source, target, **directories)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", swept)
        with pytest.raises(StoreError, match="two writers") as caught:
            store.write("name", b"x")
    assert caught.value.retriable
    assert not isinstance(caught.value, StoreMissing)


def test_a_rename_whose_answer_was_lost_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename = PosixStore(tmp_path), os.rename
    store.write("name", b"older")

    def lost(*names: str, **directories: Any) -> None:
        rename(*names, **directories)
        rename(*names, **directories)  # the client asks again, and hears that there is no such file

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lost)
        store.write("name", b"x")
    assert store.read("name") == b"x"
    assert list((tmp_path / ".holdfast/tmp").iterdir()) == []


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does it: the link is made, the answer is lost, the client asks again and hears that it exists."""
    store = PosixStore(tmp_path)
    link = os.link

    def lost(*names: str, **directories: Any) -> None:
        link(*names, **directories)
        raise FileExistsError(errno.EEXIST, "exists")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lost)
        assert store.create("claim", b"mine")
    assert not store.create("claim", b"theirs")
    assert store.read("claim") == b"mine"


def test_strange_files_are_not_listed(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.write("a", b"x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".holdfast/tmp/w-x.pt").write_bytes(b"unfinished")
    assert [info.name for info in store.list()] == ["a"]


def test_sweep_names_what_it_removed(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.begin("a.pt", nbytes=5, chunk_bytes=4096, write_id="dead").write_part(0, [memoryview(b"12345")], 0)
    removed = store.sweep()
    assert len(removed) == 1
    assert "dead-a.pt" in removed[0]
    assert store.sweep() == []


def test_a_file_of_another_machine_is_found_although_the_client_remembers_that_it_was_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an NFS client: a name that was missing stays so until its directory is opened, and that asks the server."""
    store, missing, opened = PosixStore(tmp_path), set[Path](), os.open
    (tmp_path / "records").mkdir()

    def remembering(path: Any, flags: int, *more: Any, **where: Any) -> int:
        if flags & os.O_DIRECTORY:
            missing.clear()
        elif Path(path) in missing:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        try:
            return opened(path, flags, *more, **where)
        except FileNotFoundError:
            missing.add(Path(path))
            raise

    monkeypatch.setattr(os, "open", remembering)
    with pytest.raises(StoreMissing):
        store.read("records/seal-2")
    assert missing == {tmp_path / "records" / "seal-2"}
    (tmp_path / "records" / "seal-2").write_bytes(b"sealed")
    missing.add(tmp_path / "records" / "seal-2")
    assert store.read("records/seal-2") == b"sealed"
    with pytest.raises(StoreMissing):
        store.read("no-such-directory/seal-2")
