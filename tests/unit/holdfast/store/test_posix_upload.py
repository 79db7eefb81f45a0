"""Big files past the page cache: exact bytes, room reserved first, and a failed sync is final."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreError, StoreMissing
from holdfast.store import posix_upload
from holdfast.store.posix_errors import free_bytes
from holdfast.store.posix_io import sync_directory
from holdfast.store.posix_upload import PosixUpload

_PART_BYTES = 1 << 16


def _aligned(nbytes: int) -> memoryview:
    memory = mmap.mmap(-1, nbytes + 4096)
    memory[:nbytes] = random.Random(nbytes).randbytes(nbytes)
    return memoryview(memory)[:nbytes]


def _upload(root: Path, nbytes: int, part_bytes: int = _PART_BYTES) -> PosixUpload:
    return PosixUpload(
        root=root,
        path=root / "step.pt",
        temporary=root / "tmp" / "w-step.pt",
        nbytes=nbytes,
        part_bytes=part_bytes,
    )


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, and one in shared memory: file systems differ in what O_DIRECT takes."""
    if request.param == "disk":
        yield tmp_path
        return
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, _PART_BYTES, _PART_BYTES + 1, 3 * _PART_BYTES - 5])
@pytest.mark.parametrize("shift_bytes", [0, 8])
def test_the_bytes_are_exact_whatever_the_alignment(root: Path, nbytes: int, shift_bytes: int) -> None:
    image = _aligned(nbytes + shift_bytes)[shift_bytes:]
    upload = _upload(root, nbytes)
    for index in reversed(range(-(-nbytes // _PART_BYTES))):
        upload.write_part(index, [image[index * _PART_BYTES : (index + 1) * _PART_BYTES]], 0)
    upload.publish()
    assert (root / "step.pt").read_bytes() == image
    assert list((root / "tmp").iterdir()) == []


def test_a_part_of_several_buffers_lies_back_to_back(root: Path) -> None:
    first, second, odd = _aligned(8192), _aligned(4096), _aligned(77)
    upload = _upload(root, 2 * _PART_BYTES)
    filler = _aligned(_PART_BYTES - 8192 - 4096 - 77)
    upload.write_part(1, [first, odd, second, filler], 0)
    upload.write_part(0, [_aligned(_PART_BYTES)], 0)
    upload.publish()
    assert (root / "step.pt").read_bytes()[_PART_BYTES:] == bytes(first) + bytes(odd) + bytes(second) + bytes(
        filler
    )


def test_aligned_parts_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = _upload(tmp_path, _PART_BYTES + 100)
    if upload._direct < 0:
        upload.abort()
        pytest.skip("this file system has no O_DIRECT")
    used, pwrite = set[int](), os.pwrite

    def noting(descriptor: int, data: Any, offset: int) -> int:
        used.add(descriptor)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    upload.write_part(0, [_aligned(_PART_BYTES)], 0)
    upload.write_part(1, [_aligned(100)], 0)
    assert used == {upload._direct}
    upload.write_part(0, [_aligned(_PART_BYTES + 1)[1:]], 0)
    assert used == {upload._direct, upload._file}
    upload.publish()


def test_a_direct_write_that_is_refused_is_written_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, upload = _aligned(_PART_BYTES + 100), _upload(tmp_path, _PART_BYTES + 100)
    direct, pwrite = upload._direct, os.pwrite

    def refusing(descriptor: int, data: Any, offset: int) -> int:
        if descriptor == direct:
            raise OSError(errno.EINVAL, "refused")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    upload.write_part(0, [image[:_PART_BYTES]], 0)
    upload.write_part(1, [image[_PART_BYTES:]], 0)
    upload.publish()
    assert (tmp_path / "step.pt").read_bytes() == image


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, pwrite = _aligned(_PART_BYTES), os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:5000], offset)
    )
    upload = _upload(tmp_path, _PART_BYTES)
    upload.write_part(0, [image], 0)
    upload.publish()
    assert (tmp_path / "step.pt").read_bytes() == image


def test_no_room_is_found_at_the_beginning_and_told_in_bytes(root: Path) -> None:
    free = free_bytes(root)
    assert free is not None
    needed = free + (64 << 30)
    with pytest.raises(
        StoreError, match=rf"{root}/step.pt: no room .*{needed} bytes are needed, \d+ are free.*keep_last"
    ) as caught:
        _upload(root, needed)
    assert not caught.value.retriable
    assert list((root / "tmp").iterdir()) == []


def test_room_is_reserved_before_the_first_part(tmp_path: Path) -> None:
    upload = _upload(tmp_path, 4 << 20)
    assert (tmp_path / "tmp" / "w-step.pt").stat().st_blocks * 512 >= 4 << 20
    upload.abort()


def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second fsync after a failed one may succeed on pages that the kernel has thrown away."""
    upload = _upload(tmp_path, 10)
    upload.write_part(0, [_aligned(10)], 0)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="sync failed") as caught:
            upload.publish()
    assert not caught.value.retriable
    with pytest.raises(StoreError, match="sync failed"):
        upload.publish()
    assert not (tmp_path / "step.pt").exists()
    upload.abort()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_link_whose_answer_was_lost_is_seen_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = _upload(tmp_path, 10)
    upload.write_part(0, [_aligned(10)], 0)
    link = os.link

    def lost(*names: str, **directories: Any) -> None:
        link(*names, **directories)
        link(*names, **directories)  # the client asks again, and hears that there is a file

    monkeypatch.setattr(os, "link", lost)
    upload.publish()
    assert (tmp_path / "step.pt").stat().st_size == 10
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_temporary_file_that_was_swept_is_not_waited_for(tmp_path: Path) -> None:
    upload = _upload(tmp_path, 10)
    upload.write_part(0, [_aligned(10)], 0)
    (tmp_path / "tmp" / "w-step.pt").unlink()
    with pytest.raises(StoreError, match="start over") as caught:
        upload.publish()
    assert caught.value.begin_anew
    assert not caught.value.retriable
    upload.abort()


@pytest.mark.parametrize("swept", [False, True])
def test_another_file_under_our_name_is_not_replaced_nor_taken_for_ours(tmp_path: Path, swept: bool) -> None:
    upload = _upload(tmp_path, 10)
    upload.write_part(0, [_aligned(10)], 0)
    if swept:
        (tmp_path / "tmp" / "w-step.pt").unlink()
    (tmp_path / "step.pt").write_bytes(bytes(10))
    with pytest.raises(StoreError, match="is left as it is; two writers") as caught:
        upload.publish()
    assert caught.value.begin_anew
    upload.abort()
    assert (tmp_path / "step.pt").read_bytes() == bytes(10)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_abort_under_a_writer_leaves_its_descriptor_open_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor closed under a writer is reused for another file, and the bytes land there."""
    upload, pwrite = _upload(tmp_path, _PART_BYTES), os.pwrite
    writing, aborted, errors = threading.Event(), threading.Event(), list[StoreError]()

    def slow(descriptor: int, data: Any, offset: int) -> int:
        writing.set()
        aborted.wait()
        return pwrite(descriptor, data, offset)

    def send() -> None:
        try:
            upload.write_part(0, [_aligned(_PART_BYTES)], 0)
        except StoreError as error:
            errors.append(error)

    monkeypatch.setattr(os, "pwrite", slow)
    sender = threading.Thread(target=send)
    sender.start()
    writing.wait()
    upload.abort()
    assert upload._file >= 0
    aborted.set()
    sender.join()
    assert errors == []
    assert upload._file == -1
    assert list((tmp_path / "tmp").iterdir()) == []


def _resumed(root: Path, nbytes: int, token: str, part_bytes: int = _PART_BYTES) -> PosixUpload:
    return PosixUpload(
        root=root,
        path=root / "step.pt",
        temporary=root / "tmp" / "w-step.pt",
        nbytes=nbytes,
        part_bytes=part_bytes,
        token=token,
    )


@pytest.mark.parametrize("nbytes", [1, 4096, 2 * _PART_BYTES - 5])
def test_a_resumed_file_keeps_its_bytes_and_its_room(root: Path, nbytes: int) -> None:
    image, first = _aligned(nbytes), _upload(root, nbytes)
    parts = range(-(-nbytes // _PART_BYTES))
    for index in parts[:-1]:
        first.write_part(index, [image[index * _PART_BYTES : (index + 1) * _PART_BYTES]], 0)
    blocks = (root / "tmp" / "w-step.pt").stat().st_blocks
    second = _resumed(root, nbytes, first.token)
    assert (root / "tmp" / "w-step.pt").stat().st_blocks == blocks
    second.write_part(parts[-1], [image[parts[-1] * _PART_BYTES :]], 0)
    second.publish()
    assert (root / "step.pt").read_bytes() == image
    assert list((root / "tmp").iterdir()) == []


def test_a_full_disk_does_not_keep_a_file_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room was reserved when there was some."""
    first = _upload(tmp_path, 10)
    monkeypatch.setattr("holdfast.store.posix_io.free_bytes", lambda _: 0)
    with pytest.raises(StoreError, match="no room"):
        PosixUpload(
            root=tmp_path,
            path=tmp_path / "b.pt",
            temporary=tmp_path / "tmp/b",
            nbytes=10,
            part_bytes=_PART_BYTES,
        )
    second = _resumed(tmp_path, 10, first.token)
    second.write_part(0, [_aligned(10)], 0)
    second.publish()
    assert second.published


@pytest.mark.parametrize("died", ["before the link", "after the link"])
def test_a_process_that_dies_around_the_link_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died: str
) -> None:
    """After it, the directory is synced by the one that follows: whether it was before, nobody knows."""
    first = _upload(tmp_path, 10)
    first.write_part(0, [_aligned(10)], 0)

    def die(*_: object, **_directories: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if died == "before the link":
            patch.setattr(os, "link", die)
        else:
            patch.setattr(posix_upload, "reach", die)
        with pytest.raises(KeyboardInterrupt):
            first.publish()
    synced: list[str] = []

    def noting(directory: Path | int) -> None:
        opened = isinstance(directory, int)
        synced.append(Path(f"/proc/self/fd/{directory}").readlink().name if opened else directory.name)  # type: ignore[union-attr]
        sync_directory(directory)

    monkeypatch.setattr(posix_upload, "sync_directory", noting)
    second = _resumed(tmp_path, 10, first.token)
    assert second.published == (died == "after the link")
    assert second.written() == {0}
    second.publish()
    assert synced == [tmp_path.name]
    assert (tmp_path / "step.pt").read_bytes() == _aligned(10)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_another_file_under_the_temporary_name_is_not_ours(tmp_path: Path) -> None:
    first = _upload(tmp_path, 10)
    temporary = tmp_path / "tmp" / "w-step.pt"
    other = temporary.with_name("other")
    other.write_bytes(bytes(4096))
    other.rename(temporary)
    with pytest.raises(
        StoreMissing, match=rf"{temporary} stands inode \d+ of 4096 bytes.*start over"
    ) as caught:
        _resumed(tmp_path, 10, first.token)
    assert caught.value.begin_anew
    assert temporary.read_bytes() == bytes(4096)


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    first = _upload(tmp_path, 10)
    temporary = tmp_path / "tmp" / "w-step.pt"
    temporary.rename(tmp_path / "elsewhere")
    temporary.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreMissing):
        _resumed(tmp_path, 10, first.token)


def test_a_temporary_file_of_another_size_is_not_ours(tmp_path: Path) -> None:
    first = _upload(tmp_path, 10)
    os.truncate(tmp_path / "tmp" / "w-step.pt", 5)
    with pytest.raises(StoreMissing, match="of 5 bytes"):
        _resumed(tmp_path, 10, first.token)


def test_a_file_whose_sync_failed_is_not_there_to_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process would sync it with success, and publish it with holes."""
    upload = _upload(tmp_path, 10)
    upload.write_part(0, [_aligned(10)], 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: _raise(errno.EIO))
        with pytest.raises(StoreError, match="sync failed") as caught:
            upload.publish()
    assert caught.value.begin_anew
    with pytest.raises(StoreError, match="sync failed"):
        upload.write_part(0, [_aligned(10)], 0)
    with pytest.raises(StoreMissing):
        _resumed(tmp_path, 10, upload.token)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EDQUOT, errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_cut_that_is_refused_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    upload = _upload(tmp_path, 10)
    upload.write_part(0, [_aligned(10)], 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda *_: _raise(number))
        with pytest.raises(StoreError) as caught:
            upload.publish()
    assert not caught.value.begin_anew
    upload.publish()
    assert (tmp_path / "step.pt").read_bytes() == _aligned(10)


def _raise(number: int) -> None:
    raise OSError(number, os.strerror(number))


def _refuse_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    pwrite, refused = os.pwrite, list[int]()

    def write(descriptor: int, data: Any, offset: int) -> int:
        if not refused:
            refused.append(descriptor)
            _raise(number)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)


_HELD = [errno.EROFS, errno.EDQUOT, errno.ENOSPC, errno.EACCES]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, *_HELD])
def test_an_error_of_a_direct_write_costs_this_write_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    image, upload = _aligned(2 * _PART_BYTES), _upload(tmp_path, 2 * _PART_BYTES)
    if upload._direct < 0:
        pytest.skip("this file system has no O_DIRECT")
    upload.write_part(0, [image[:_PART_BYTES]], 0)
    descriptors = (upload._file, upload._direct)
    _refuse_once(monkeypatch, number)
    with pytest.raises(StoreError) as caught:
        upload.write_part(1, [image[_PART_BYTES:]], 0)
    assert caught.value.retriable == (number not in _HELD)
    assert not caught.value.begin_anew
    assert upload.written() == {0}
    assert (upload._file, upload._direct) == descriptors
    upload.write_part(1, [image[_PART_BYTES:]], 0)
    upload.publish()
    assert (tmp_path / "step.pt").read_bytes() == image


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_an_error_of_a_write_through_the_cache_may_tell_of_earlier_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    upload = _upload(tmp_path, 2 * _PART_BYTES)
    upload.write_part(0, [_aligned(_PART_BYTES + 1)[1:]], 0)  # not aligned
    _refuse_once(monkeypatch, number)
    with pytest.raises(StoreError, match="earlier bytes") as caught:
        upload.write_part(1, [_aligned(_PART_BYTES + 1)[1:]], 0)
    assert caught.value.begin_anew
    assert not caught.value.retriable
    with pytest.raises(StoreError, match="earlier bytes"):
        upload.publish()
    assert list((tmp_path / "tmp").iterdir()) == []
    upload.abort()


def test_a_handle_that_is_stale_because_the_file_is_gone_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = _upload(tmp_path, _PART_BYTES)
    if upload._direct < 0:
        pytest.skip("this file system has no O_DIRECT")
    (tmp_path / "tmp" / "w-step.pt").unlink()
    _refuse_once(monkeypatch, errno.ESTALE)
    with pytest.raises(StoreError, match="removed by another writer") as caught:
        upload.write_part(0, [_aligned(_PART_BYTES)], 0)
    assert caught.value.begin_anew
    upload.abort()
