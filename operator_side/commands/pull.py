"""`holdfast pull URL[@STEP] DEST`: copy the portable file here, checked as it comes.

store ─► buffer ─► CRC of each chunk against the manifest ─► .DEST.….part, kept over a death ─► fsync ─► rename
  └ a step that is there as slices alone: put together on the way, each frame checked against its seal
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from holdfast import crc
from holdfast.checkpoints.assembly import copy_out
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.slice_sets import SliceSet, complete_sets, load_set
from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, print_json, progress_bar
from holdfast.command.place import place, unwritable, write_whole
from holdfast.errors import DamageError, StoreMissing
from holdfast.image.manifest import Manifest, step_file_name
from holdfast.ring.pages import direct_window
from holdfast.store.base import Store
from operator_side.commands.partial import partial
from operator_side.commands.target import TARGET, Target

_log = logging.getLogger("holdfast.cli")
_BUFFER_BYTES = 16 * 1024 * 1024
_READS_MAX = 2  # a chunk that came wrong may have changed on its way only


@click.command(
    short_help="Copy a checkpoint here as one file that torch.load reads.",
    epilog=examples(
        "holdfast pull s3://bucket/run .              # the newest good one, under its own name",
        "holdfast pull s3://bucket/run@1000 step.pt",
    ),
)
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

    An interrupted copy is kept beside DEST as a hidden file .part; the same command again fetches only what is missing,
    and reads what is there once more, to check it. One of slices begins anew.

    JSON: {"url", "step", "file", "destination", "nbytes", "crc32", "kept_bytes"}.
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
    path = place(destination, manifest.file, force=force)
    kept_bytes = pull_file(catalog.store, manifest, path, quiet=as_json)
    names: dict[str, str | int] = {
        "url": catalog.store.url,
        "step": manifest.step,
        "file": manifest.file,
    }
    _say(names, path, manifest.image_bytes, manifest.image_crc32, kept_bytes=kept_bytes, as_json=as_json)


def pull_file(store: Store, manifest: Manifest, path: Path, *, quiet: bool) -> int:
    """Copy the file of `manifest` to `path`, checked as it comes. What an earlier call fetched is not fetched again.

    Returns:
        How many bytes were here already.

    Raises:
        BusyError: Another process is fetching it to the same place.
        DamageError: It is not what was written.
        StoreError: The store failed, or the file cannot be written. What has come is kept.
    """
    kept_bytes = 0
    with progress_bar(manifest.file, manifest.image_bytes, hidden=quiet) as advance:
        try:
            with partial(path, manifest.image_crc32, manifest.image_bytes) as fd:
                kept_bytes = _kept(fd, manifest)
                advance(kept_bytes)
                try:
                    _stream(store, manifest, fd, kept_bytes // manifest.chunk_bytes, advance)
                except DamageError:
                    os.truncate(fd, 0)
                    raise
        except OSError as error:
            raise unwritable(path, manifest.image_bytes, error) from error
    return kept_bytes


def _pull_slices(
    catalog: Catalog, sets: Sequence[SliceSet], destination: Path, *, force: bool, as_json: bool
) -> None:
    """The first of these sets that is good."""
    store = catalog.store
    for found in sets:
        file = step_file_name(found.step)
        path = place(destination, file, force=force)
        sums: list[int] = []
        try:
            loaded = load_set(store, found)
            nbytes = loaded.layout.image_bytes
            with progress_bar(f"step {found.step}", nbytes, hidden=as_json) as advance:

                def fill(fd: int) -> None:
                    parts = _FileParts(fd, loaded.layout.chunk_bytes)  # noqa: B023 - called at once
                    sums.append(copy_out(store, loaded, parts, progress=advance))  # noqa: B023

                write_whole(path, nbytes, fill)
        except DamageError as error:
            if found is sets[-1]:
                raise
            _log.warning("not used: %s", error)
            continue
        _say({"url": store.url, "step": found.step, "file": file}, path, nbytes, sums[0], as_json=as_json)
        return


def _say(
    names: Mapping[str, str | int], path: Path, nbytes: int, crc32: int, *, as_json: bool, kept_bytes: int = 0
) -> None:
    if as_json:
        told = {"destination": str(path), "nbytes": nbytes, "crc32": crc32, "kept_bytes": kept_bytes}
        print_json({**names, **told})
        return
    kept = f", of which {kept_bytes} were here already" if kept_bytes else ""
    said = f"{path}: step {names['step']}, {nbytes} bytes{kept}, all good"
    console().print(said, markup=False)


class _FileParts:
    """An open file, as what takes parts."""

    def __init__(self, fd: int, part_bytes: int) -> None:
        self._fd, self.part_bytes = fd, part_bytes

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:  # noqa: ARG002
        """In order, as they come."""
        for buffer in buffers:
            _write_all(self._fd, buffer)


def _kept(fd: int, manifest: Manifest) -> int:
    """How many bytes at the begin of the file are what they should be: whole chunks, or all. The rest is cut off."""
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, manifest.chunk_bytes, manifest.image_bytes)))
    nbytes = os.fstat(fd).st_size
    for chunk, expected in enumerate(manifest.chunk_crc32s):
        begin, end = _extent(manifest, chunk)
        offset, found = begin, 0
        while offset < min(end, nbytes):
            got = os.preadv(fd, [buffer[: min(len(buffer), end - offset)]], offset)
            if not got:
                break
            found = crc.crc32(buffer[:got], found)
            offset += got
        if offset < end or found != expected:
            os.truncate(fd, begin)
            return begin
    os.truncate(fd, manifest.image_bytes)
    return manifest.image_bytes


def _stream(store: Store, manifest: Manifest, fd: int, first: int, advance: Callable[[int], None]) -> None:
    """Fetch the chunks from `first` on."""
    buffer = direct_window(max(1, min(_BUFFER_BYTES, manifest.chunk_bytes, manifest.image_bytes)))
    for chunk, expected in list(enumerate(manifest.chunk_crc32s))[first:]:
        begin, end = _extent(manifest, chunk)
        found = 0
        for _ in range(_READS_MAX):
            offset, found = begin, 0
            while offset < end:
                part = buffer[: min(len(buffer), end - offset)]
                store.read_into(manifest.file, offset, part)
                found = crc.crc32(part, found)
                os.lseek(fd, offset, os.SEEK_SET)
                _write_all(fd, part)
                offset += len(part)
            if found == expected:
                break
        else:
            raise DamageError(
                f"{store.url}/{manifest.file}: chunk {chunk} (bytes {begin}-{end - 1}): "
                f"expected CRC-32 {expected:08x}, got {found:08x}; "
                "`holdfast verify` names the tensors, `holdfast ls` other steps"
            )
        advance(end - begin)
    image_crc32 = crc.combine_all(
        (expected, _extent(manifest, chunk)[1] - _extent(manifest, chunk)[0])
        for chunk, expected in enumerate(manifest.chunk_crc32s)
    )
    if image_crc32 != manifest.image_crc32:
        raise DamageError(
            f"{manifest.file}: expected CRC-32 {manifest.image_crc32:08x}, got {image_crc32:08x}"
        )


def _extent(manifest: Manifest, chunk: int) -> tuple[int, int]:
    begin = chunk * manifest.chunk_bytes
    return begin, min(begin + manifest.chunk_bytes, manifest.image_bytes)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
