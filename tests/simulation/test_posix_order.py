"""The real PosixStore, with a power failure after each of its calls: all data reported as durable survives, whole."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import StoreMissing
from holdfast.image.manifest import EntryRecord, Manifest, manifest_name, step_file_name
from holdfast.store import posix as posix_module
from holdfast.store import posix_io, posix_upload
from holdfast.store import spare_room as posix_room
from holdfast.store.base import SMALL_BYTES_MAX, InterruptedUpload, ObjectInfo
from holdfast.store.names import TEMPORARY
from holdfast.store.posix import PosixStore
from tests.simulation.disk import Call, Disk, PowerCut
from tests.simulation.images import CHUNK_BYTES, image
from tests.support.images import Image

STATES_PER_CALL = 12


def manifest_of(made: Image, step: int) -> Manifest:
    layout, final = made.layout, made.final
    extents = [layout.chunk_extent(chunk) for chunk in range(layout.chunks)]
    return Manifest(
        run="run",
        attempt=1,
        step=step,
        file=step_file_name(step),
        image_bytes=layout.image_bytes,
        image_crc32=zlib.crc32(final),
        chunk_bytes=layout.chunk_bytes,
        chunk_crc32s=tuple(zlib.crc32(final[e.offset : e.end]) for e in extents),
        ranks=layout.ranks,
        layout_digest=layout.digest,
        write_id="w",
        created="",
        pgt1_seconds=0.0,
        pgt2_seconds=0.0,
        entries=tuple(
            EntryRecord(
                name=e.name, offset=e.offset, nbytes=e.nbytes, crc32=zlib.crc32(final[e.offset : e.end])
            )
            for e in layout.entries
        ),
        tensors=(),
    )


def save(store: PosixStore, disk: Disk, step: int, *, resume: str | None = None) -> None:
    """Write one checkpoint as a flusher does; with `resume`, continue it as the next flusher does."""
    made = image(step, 2, 0, step)
    layout, name = made.layout, step_file_name(step)
    nbytes, write_id = layout.image_bytes, f"w{step}"
    if resume is None:
        upload = store.begin(name, nbytes=nbytes, chunk_bytes=CHUNK_BYTES, write_id=write_id)
        disk.returned(("token", step, upload.token))
    else:
        try:
            upload = store.resume(name, InterruptedUpload(nbytes, CHUNK_BYTES, write_id, resume))
        except StoreMissing:
            upload = store.begin(name, nbytes=nbytes, chunk_bytes=CHUNK_BYTES, write_id=write_id)
    if not upload.published:
        for part in range(layout.chunks):
            data = made.final[part * CHUNK_BYTES : (part + 1) * CHUNK_BYTES]
            upload.write_part(part, [memoryview(data)], zlib.crc32(data))
        upload.publish()
    disk.returned(("file", name, made.final))
    manifest = manifest_of(made, step)
    store.write(manifest_name(name), manifest.to_bytes())
    disk.returned(("listed", step))


def run(store: PosixStore, disk: Disk) -> None:
    """Write two checkpoints, let retention remove the first, and write a third into its room."""
    store.create(".holdfast/writer-000001.json", b"claim")
    disk.returned(("file", ".holdfast/writer-000001.json", b"claim"))
    save(store, disk, 0)
    save(store, disk, 1)
    disk.returned(("going", 0))
    store.delete(manifest_name(step_file_name(0)))
    disk.returned(("gone", 0))
    store.retire(step_file_name(0))
    save(store, disk, 2)


class _Left:
    """The files that survived, as a store for the catalog."""

    url = "left"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = {name: data for name, data in files.items() if not name.startswith(TEMPORARY)}

    def list(self) -> list[ObjectInfo]:
        return [ObjectInfo(name, len(data)) for name, data in sorted(self.files.items())]

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        assert len(self.files[name]) <= bytes_max
        return self.files[name]


def complaints(disk: Disk, *, seed: int = 0) -> list[str]:
    """Describe the first broken promise in any state that power failures may leave."""
    chance = random.Random(seed)
    found: list[str] = []
    for count in range(len(disk.calls) + 1):
        for _ in range(STATES_PER_CALL):
            files, notes = disk.after_power_cut(count, chance)
            found += [f"after call {count}: {what}" for what in _wrong(files, notes)]
            if found:
                return found
    return found


def _wrong(files: dict[str, bytes], notes: list[tuple[object, ...]]) -> list[str]:
    wrong = []
    listed = set()
    for item in Catalog(_Left(files)).list():  # type: ignore[arg-type]
        if item.manifest is None or item.fault:
            wrong.append(f"{item.name} is listed: {item.fault}")
            continue
        listed.add(item.step)
        if zlib.crc32(files[item.manifest.file]) != item.manifest.image_crc32:
            wrong.append(f"{item.manifest.file} is listed, and has other bytes")
    going = {note[1] for note in notes if note[0] == "going"}
    gone_files = {step_file_name(step) for step in going if isinstance(step, int)}
    for note in notes:
        if note[0] == "listed" and note[1] not in listed | going:
            wrong.append(f"step {note[1]} was durable, and is not listed")
        if note[0] == "gone" and note[1] in listed:
            wrong.append(f"step {note[1]} was removed, and is listed")
        there = files.get(str(note[1])) if note[0] == "file" else None
        if note[0] == "file" and there != note[2] and (there is not None or note[1] not in gone_files):
            wrong.append(f"{note[1]} was published, and is not there as it was")
    return wrong


def test_power_may_fail_after_any_call(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    with disk.recording():
        run(PosixStore(tmp_path / "run"), disk)
    assert len(disk.calls) > 40
    rename_roots(disk)
    assert complaints(disk) == []


def test_a_process_dies_at_any_call_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """Kill at each call in turn; another process resumes; then power fails after each of its calls."""
    died = 0
    for number in range(200):
        root = tmp_path / str(number)
        root.mkdir()
        disk = Disk(root, die_at=number)
        with disk.recording():
            store = PosixStore(root / "run")
            try:
                save(store, disk, 2)
            except PowerCut:
                died += 1
                tokens = [call.note[2] for call in disk.calls if call.what == "returned"]
                save(PosixStore(root / "run"), disk, 2, resume=tokens[0] if tokens else "inode-1")
            else:
                if number > len(disk.calls):
                    break
        rename_roots(disk)
        assert complaints(disk, seed=number) == []
    assert died > 20


def rename_roots(disk: Disk) -> None:
    """Make the run's directory the root of the recorded calls; its existence is part of the promise."""
    for call in disk.calls:
        for attribute in ("place", "note"):
            value = getattr(call, attribute)
            if isinstance(value, str) and (value == "run" or value.startswith("run/")):
                setattr(call, attribute, value[4:] or ".")
    disk.calls = [call for call in disk.calls if not (call.what == "mkdir" and call.name == "run")]


def no_directory_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (posix_module, posix_io, posix_room, posix_upload):
        monkeypatch.setattr(module, "sync_directory", lambda directory: None)


def no_file_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: posix_upload.PosixUpload, nbytes: int) -> None:
        os.ftruncate(self._file, nbytes)

    monkeypatch.setattr(posix_upload.PosixUpload, "_truncate_and_sync", sync)


def no_sync_of_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = posix_module.PosixStore._write_temporary

    def write(self: PosixStore, name: str, data: bytes) -> Path:
        real = os.fsync
        os.fsync = lambda fd: None
        try:
            return before(self, name, data)
        finally:
            os.fsync = real

    monkeypatch.setattr(posix_module.PosixStore, "_write_temporary", write)


def sync_before_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync comes too early: right after the file was made."""
    begin = posix_upload.PosixUpload._begin

    def begun(self: posix_upload.PosixUpload, room: posix_room.SpareFile | None) -> None:
        begin(self, room)
        os.fsync(self._file)

    monkeypatch.setattr(posix_upload.PosixUpload, "_begin", begun)
    no_file_sync(monkeypatch)


def directory_sync_before_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    link = posix_upload.PosixUpload._link

    def linked(self: posix_upload.PosixUpload, here: int) -> None:
        posix_io.sync_directory(here)
        link(self, here)

    monkeypatch.setattr(posix_upload.PosixUpload, "_link", linked)
    no_op: Callable[[Path | int], None] = lambda directory: None  # noqa: E731
    monkeypatch.setattr(posix_upload, "sync_directory", no_op)
    monkeypatch.setattr(posix_module, "sync_directory", no_op)


def room_used_while_its_old_name_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix_room, "sync_directory", lambda directory: None)


@pytest.mark.parametrize(
    "bug",
    [
        no_directory_sync,
        no_file_sync,
        no_sync_of_small_files,
        sync_before_the_bytes,
        directory_sync_before_the_name,
        room_used_while_its_old_name_may_come_back,
    ],
)
def test_each_missing_or_misplaced_sync_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    if bug is room_used_while_its_old_name_may_come_back and not posix_room.writes_in_place(tmp_path):
        pytest.skip(f"{tmp_path} is not on ext4 or XFS: no room is used again there")
    bug(monkeypatch)
    disk = Disk(tmp_path)
    with disk.recording():
        run(PosixStore(tmp_path / "run"), disk)
    rename_roots(disk)
    assert complaints(disk) != []


def test_the_record_is_what_was_done(tmp_path: Path) -> None:
    """Without a power failure, replaying the calls gives the files that are really there."""
    disk = Disk(tmp_path)
    with disk.recording():
        run(PosixStore(tmp_path / "run"), disk)
    everything = Disk(tmp_path, [*disk.calls], skip=lambda call: False)
    for call in disk.calls:
        if call.what in {"link", "rename", "unlink", "mkdir", "data", "size"}:
            everything.calls.append(Call("sync", call.place))
    files, _ = everything.after_power_cut(len(everything.calls), random.Random(0))
    there = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert files == there
