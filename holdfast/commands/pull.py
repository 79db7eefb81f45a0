"""`holdfast pull URL[@STEP] DEST`: copy the portable file here, checked as it comes.

store ─► buffer ─► CRC of each chunk against the manifest ─► .DEST.<random>.part ─► fsync ─► rename
  └ a step that is there as slices alone: put together on the way, each frame checked against its seal
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from holdfast import crc
from holdfast.assembly import copy_out
from holdfast.catalog import Catalog
from holdfast.commands.output import console, json_option, print_json, progress_bar
from holdfast.commands.target import TARGET, Target
from holdfast.errors import ConfigError, DamageError, StoreError, StoreMissing
from holdfast.manifest import Manifest, step_file_name
from holdfast.slice_sets import SliceSet, complete_sets, load_set
from holdfast.storage.base import Store

__all__ = ["pull"]

_log = logging.getLogger("holdfast.cli")
_BUFFER_BYTES = 16 * 1024 * 1024


@click.command(short_help="Copy a checkpoint here as one file that torch.load reads.")
@click.argument("target", metavar="URL[@STEP]", type=TARGET)
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace DEST if it is there.")
@json_option
def pull(as_json: bool, target: Target, destination: Path, force: bool) -> None:
    """Copy a checkpoint of the run at URL to DEST: a file, or a directory, where it keeps its name.

    Without @STEP: the newest good checkpoint. Every byte is checked as it comes; DEST appears only when all
    are good and on disk. The file is read by torch.load(DEST, weights_only=True), without holdfast.

    A step that ranks wrote to the store as slices, and of which there is no file, is put together as it comes; nothing
    changes in the store. Without @STEP it is so only where the run has no file at all.

    JSON: {"url", "step", "file", "destination", "nbytes", "crc32"}.
    """
    catalog = target.catalog()
    try:
        manifest = catalog.get(target.step)
    except StoreMissing:
        sets = [found for found in complete_sets(catalog.slices()) if target.step in (None, found.step)]
        if not sets:
            raise
        _pull_slices(catalog, sets, destination, force=force, as_json=as_json)
        return
    path = _place(destination, manifest.file, force=force)
    with progress_bar(manifest.file, manifest.image_bytes, hidden=as_json) as advance:
        _write(path, manifest.image_bytes, lambda fd: _stream(catalog.store, manifest, fd, advance))
    names: dict[str, str | int] = {
        "url": catalog.store.url,
        "step": manifest.step,
        "file": manifest.file,
    }
    _say(names, path, manifest.image_bytes, manifest.image_crc32, as_json=as_json)


def _pull_slices(
    catalog: Catalog, sets: Sequence[SliceSet], destination: Path, *, force: bool, as_json: bool
) -> None:
    """The first of these sets that is good."""
    store = catalog.store
    for found in sets:
        file = step_file_name(found.step)
        path = _place(destination, file, force=force)
        sums: list[int] = []
        try:
            loaded = load_set(store, found)
            nbytes = loaded.layout.image_bytes
            with progress_bar(f"step {found.step}", nbytes, hidden=as_json) as advance:

                def fill(fd: int) -> None:
                    parts = _FileParts(fd, loaded.layout.chunk_bytes)  # noqa: B023 - called at once
                    sums.append(copy_out(store, loaded, parts, progress=advance))  # noqa: B023

                _write(path, nbytes, fill)
        except DamageError as error:
            if found is sets[-1]:
                raise
            _log.warning("not used: %s", error)
            continue
        _say({"url": store.url, "step": found.step, "file": file}, path, nbytes, sums[0], as_json=as_json)
        return


def _say(names: Mapping[str, str | int], path: Path, nbytes: int, crc32: int, *, as_json: bool) -> None:
    if as_json:
        print_json({**names, "destination": str(path), "nbytes": nbytes, "crc32": crc32})
    else:
        console().print(f"{path}: step {names['step']}, {nbytes} bytes, all good", markup=False)


class _FileParts:
    """An open file, as what takes parts."""

    def __init__(self, fd: int, part_bytes: int) -> None:
        self._fd, self.part_bytes = fd, part_bytes

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:  # noqa: ARG002
        """In order, as they come."""
        for buffer in buffers:
            _write_all(self._fd, buffer)


def _place(destination: Path, file_name: str, *, force: bool) -> Path:
    """Where the file goes. Raises `ConfigError` when it cannot, before anything is read."""
    try:
        path = destination / file_name if destination.is_dir() else destination
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: its directory {path.parent} does not exist; make it first")
        if path.is_dir():
            raise ConfigError(f"{path}: is a directory; name a file in it")
        if path.exists() and not force:
            raise ConfigError(f"{path}: is already there; --force replaces it")
    except OSError as error:  # a name that is too long, a directory that may not be entered
        raise ConfigError(f"{destination}: cannot be used: {error.strerror}") from error
    return path


def _write(path: Path, nbytes: int, fill: Callable[[int], None]) -> None:
    """Have the file at `path` filled by way of a temporary name beside it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fill(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written: {error.strerror} ({nbytes} bytes are needed)"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed, or never made
            temporary.unlink()


def _stream(store: Store, manifest: Manifest, fd: int, advance: Callable[[int], None]) -> None:
    buffer = memoryview(mmap.mmap(-1, max(1, min(_BUFFER_BYTES, manifest.chunk_bytes, manifest.image_bytes))))
    image_crc32 = 0
    offset = 0
    for chunk, expected in enumerate(manifest.chunk_crc32s):
        begin, chunk_crc32 = offset, 0
        end = min(begin + manifest.chunk_bytes, manifest.image_bytes)
        while offset < end:
            part = buffer[: min(len(buffer), end - offset)]
            store.read_into(manifest.file, offset, part)
            chunk_crc32 = crc.crc32(part, chunk_crc32)
            _write_all(fd, part)
            offset += len(part)
            advance(len(part))
        if chunk_crc32 != expected:
            raise DamageError(
                f"{store.url}/{manifest.file}: chunk {chunk} (bytes {begin}-{end - 1}): "
                f"expected CRC-32 {expected:08x}, got {chunk_crc32:08x}; "
                "`holdfast verify` names the tensors, `holdfast ls` other steps"
            )
        image_crc32 = crc.combine(image_crc32, chunk_crc32, end - begin)
    if image_crc32 != manifest.image_crc32:
        raise DamageError(
            f"{manifest.file}: expected CRC-32 {manifest.image_crc32:08x}, got {image_crc32:08x}"
        )


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
