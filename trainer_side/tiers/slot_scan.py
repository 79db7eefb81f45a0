"""Reading the slot files in a directory, whoever wrote them.

    examine     one file: is it ours, whole, of this run and of the rank that its name says?
    scan        all sealed slices of a run; the log names a file that is not readable, and the file stays as it is

This takes no lock and writes nothing: a file may have a living writer. Bytes of a slot that is being written again have
wrong CRCs; the reader of the slices compares them.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError, DamageError, HoldfastError
from holdfast.image.layout import Layout
from holdfast.ring.directory import open_private_file
from holdfast.store.posix_errors import translated
from trainer_side.tiers.slot_file import read_layout, read_seal, read_sectors
from trainer_side.tiers.slot_format import PAGE_BYTES, Commitment, Superblock, newest
from trainer_side.tiers.tier import Kept
from trainer_side.tiers.tier_directory import TierDirectory

_log = logging.getLogger("holdfast.trainer")


class Examined(NamedTuple):
    """A slot file that is whole. `committed`: the slices that the record names, per slot."""

    superblock: Superblock
    layout: Layout
    committed: tuple[Commitment | None, ...]
    seals_missing: dict[int, str]  # slots that the record names and whose seal is damaged, with what is wrong
    kept: tuple[Kept, ...]


class Scanned(NamedTuple):
    """The slot files of a run.

    Attributes:
        files: Those that can be read, with their sealed slices.
        damage: What cannot be read, with the reason: whole files, and slices of steps that every rank had sealed.
    """

    files: list[tuple[Superblock, tuple[Kept, ...]]]
    damage: list[str]


def examine(path: Path, place: TierDirectory, rank: int, layouts: dict[str, Layout]) -> Examined:
    """Read everything in a slot file except the slices.

    Args:
        path: The path of the file.
        place: The directory of the run that the file should belong to.
        rank: The rank in the name of the file.
        layouts: Known layouts, by digest; the layout of the file is added.

    Raises:
        ConfigError: The file is not ours, or of another run or rank.
        DamageError, ProtocolError: The file is no slot file that this version can read.
        StoreError: The device refused.
    """
    source = str(path)
    with translated("open", path):
        file = open_private_file(path, os.O_RDONLY)
    try:
        with translated("read", path):
            read = partial(_pread, file)
            superblock = Superblock.from_bytes(read(0, PAGE_BYTES), source=source)
            if superblock.run_digest != place.run_digest:
                raise ConfigError(
                    f"{path}: belongs to another run ({superblock.run}), expected {place.run}. The file is left as it "
                    "is: move it away, or choose another directory"
                )
            if superblock.rank != rank:
                raise ConfigError(
                    f"{path}: holds slices of rank {superblock.rank}, its name says rank {rank}. The file is left as "
                    "it is: give it its own name back, or move it away"
                )
            file_bytes = os.fstat(file).st_size
            if file_bytes < superblock.file_bytes:
                raise DamageError(
                    f"{source}: cut short: {file_bytes} bytes, expected {superblock.file_bytes}"
                )
            layout = read_layout(read, superblock, layouts, source=source)
            sectors = read_sectors(read, superblock)
            current = newest(sectors)
            sector = None if current is None else sectors[current]
            if sector is None:
                raise DamageError(
                    f"{source}: neither commit sector is whole, so nobody knows what its slots hold"
                )
            missing: dict[int, str] = {}
            kept = []
            for slot, commitment in enumerate(sector.slots):
                if commitment is None:
                    continue
                try:
                    seal = read_seal(read, superblock, layout, slot, commitment, source=source)
                except DamageError as error:
                    _log.warning("%s", error)
                    missing[slot] = str(error)
                else:
                    kept.append(Kept(seal, layout, source, slot, complete=commitment.complete))
            return Examined(superblock, layout, sector.slots, missing, tuple(kept))
    finally:
        os.close(file)


def scan(place: TierDirectory, layouts: dict[str, Layout]) -> Scanned:
    """All readable slot files of a run with their sealed slices. The log names a file that is not readable."""
    found = Scanned([], [])
    for path, rank in place.slot_paths():
        try:
            examined = examine(path, place, rank, layouts)
        except HoldfastError as error:
            if path.exists():  # else its writer has just removed it
                _log.warning("local tier: leaving out a file: %s", error)
                if not isinstance(error, ConfigError):  # another run's, or another rank's
                    found.damage.append(str(error))
        else:
            found.files.append((examined.superblock, examined.kept))
            for slot, reason in examined.seals_missing.items():
                committed = examined.committed[slot]
                if committed is not None and committed.complete:
                    found.damage.append(f"step {committed.step} (attempt {committed.attempt}): {reason}")
    return found


def _pread(file: int, offset: int, nbytes: int) -> bytes:
    done = b""
    while len(done) < nbytes:
        piece = os.pread(file, nbytes - len(done), offset + len(done))
        if not piece:
            break
        done += piece
    return done
