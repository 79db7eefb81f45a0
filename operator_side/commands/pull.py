"""`holdfast pull URL[@STEP] DEST`: copies a checkpoint file to this machine, and checks every byte of it.

store ─► buffer ─► CRC of each chunk against the manifest ─► .DEST.….part, kept for the next call ─► fsync ─► rename
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click

from holdfast import crc
from holdfast.checkpoints.best_finder import find_best
from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json, print_line, progress_bar
from holdfast.command.place import check_file_place, write_all, write_error
from holdfast.errors import ConfigError, DamageError
from holdfast.image.manifest import Manifest
from holdfast.ring.pages import aligned_buffer
from holdfast.store.base import Store
from operator_side.commands.options import choice, force_flag, text
from operator_side.commands.partial import partial
from operator_side.commands.target import TARGET, Target

_BUFFER_BYTES = 16 * 1024 * 1024
_READS_MAX = 2  # a chunk may have been damaged only on its way here


@click.command(
    short_help="Copy a checkpoint here as one file that torch.load reads.",
    epilog=examples(
        "holdfast pull s3://bucket/run .              # the newest good checkpoint, under its own name",
        "holdfast pull s3://bucket/run@1000 step.pt",
        "holdfast pull s3://bucket/run best.pt --best val_loss",
    ),
)
@click.argument("target", metavar="URL[@STEP]", type=TARGET)
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@text("--best", "Copy the best good checkpoint by this metric.", metavar="METRIC")
@choice(
    "--mode",
    ["min", "max"],
    "The value of METRIC that is best: min is the lowest, max the highest. Default: as the run's best_mode says.",
)
@force_flag("DEST")
@json_option
def pull(
    as_json: bool,
    target: Target,
    destination: Path,
    best: str | None,
    mode: Literal["min", "max"] | None,
    force: bool,
) -> None:
    """Copy a checkpoint of the run at URL to DEST, which is a file name or a directory.

    Without @STEP the command copies the newest good checkpoint. It checks every byte, and DEST appears only when all of
    it is good and on disk. torch.load(DEST, weights_only=True) reads the file without holdfast.

    An interrupted copy is kept beside DEST as a hidden .part file. Run the same command again to fetch the rest; it
    checks the kept part first.

    JSON: {"url", "step", "file", "destination", "nbytes", "crc32", "kept_bytes"}.
    """
    if best is None and mode is not None:
        raise ConfigError(f"--mode {mode} is for a metric; give --best METRIC with it")
    if best is not None and target.step is not None:
        raise ConfigError(f"--best {best} and @{target.step} both name a checkpoint; leave one of them out")
    catalog = target.catalog()
    manifest = catalog.get(target.step) if best is None else find_best(catalog, best, mode)
    path = check_file_place(destination, manifest.file, force=force)
    kept_bytes = pull_file(catalog.store, manifest, path, quiet=as_json)
    if as_json:
        names = {"url": catalog.store.url, "step": manifest.step, "file": manifest.file}
        facts = {"destination": str(path), "nbytes": manifest.image_bytes, "crc32": manifest.image_crc32}
        print_json({**names, **facts, "kept_bytes": kept_bytes})
        return
    kept = f", of which {kept_bytes} had been fetched before" if kept_bytes else ""
    print_line(f"{path}: step {manifest.step}, {manifest.image_bytes} bytes{kept}, all checked")


def pull_file(store: Store, manifest: Manifest, path: Path, *, quiet: bool) -> int:
    """Copy the file of `manifest` to `path` and check it. Return the bytes that an earlier call had fetched. Raises
    `BusyError`: another process fetches it; `DamageError`: the bytes differ; `StoreError`: the fetched part stays.
    """
    kept_bytes = 0
    with progress_bar(manifest.file, manifest.image_bytes, hidden=quiet) as advance:
        try:
            with partial(path, manifest.image_crc32, manifest.image_bytes) as fd:
                kept_bytes = _keep_good_prefix(fd, manifest)
                advance(kept_bytes)
                try:
                    _stream(store, manifest, fd, kept_bytes // manifest.chunk_bytes, advance)
                except DamageError:
                    os.truncate(fd, 0)
                    raise
        except OSError as error:
            raise write_error(path, manifest.image_bytes, error) from error
    return kept_bytes


def _keep_good_prefix(fd: int, manifest: Manifest) -> int:
    """Truncate the file to its good beginning, whole chunks or all of the image; return the size."""
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
    buffer = aligned_buffer(max(1, min(_BUFFER_BYTES, manifest.chunk_bytes, manifest.image_bytes)))
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
                write_all(fd, part)
                offset += len(part)
            if found == expected:
                break
        else:
            raise DamageError(
                f"{store.url}/{manifest.file}: chunk {chunk} (bytes {begin}-{end - 1}): "
                f"expected CRC-32 {expected:08x}, got {found:08x}; "
                "`holdfast verify` names the damaged tensors, `holdfast ls` lists other steps"
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
