"""Reading slot files that somebody wrote: what is in a directory, and whether it is what it says.

    examine     a file by its path: ours, whole, of this run, of the rank that its name says
    scan        all sealed slices of a run in a directory; what is not readable is named, and left as it is

Nothing is locked, and nothing written: a file may have a living writer. What is read of a slot that is being written
again has wrong CRCs, which the reader of the slices compares.
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
    """A slot file that is whole. `committed`: per slot what the record names."""

    superblock: Superblock
    layout: Layout
    committed: tuple[Commitment | None, ...]
    seals_missing: tuple[int, ...]  # named by the record, and not as they were committed
    kept: tuple[Kept, ...]


def examine(path: Path, place: TierDirectory, rank: int, layouts: dict[str, Layout]) -> Examined:
    """Read all of a slot file but its slices.

    Args:
        path: Of the file.
        place: Of the run that it should be of.
        rank: That its name says.
        layouts: By digest; those that are known already, and then also this one.

    Raises:
        ConfigError: Not our file, or one of another run or rank.
        DamageError, ProtocolError: Not a slot file that this version can read.
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
                    f"{path}: it is of another run ({superblock.run}), expected {place.run}; it is left as it is: "
                    "move it away, or choose another directory"
                )
            if superblock.rank != rank:
                raise ConfigError(
                    f"{path}: it is of rank {superblock.rank}; it is left as it is: give it its own name back, or move "
                    "it away"
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
                    f"{source}: neither commit sector is whole; what its slots hold is not known"
                )
            missing, kept = [], []
            for slot, commitment in enumerate(sector.slots):
                if commitment is None:
                    continue
                try:
                    seal = read_seal(read, superblock, layout, slot, commitment, source=source)
                except DamageError as error:
                    _log.warning("%s", error)
                    missing.append(slot)
                else:
                    kept.append(Kept(seal, layout, source, slot))
            return Examined(superblock, layout, sector.slots, tuple(missing), tuple(kept))
    finally:
        os.close(file)


def scan(place: TierDirectory, layouts: dict[str, Layout]) -> list[tuple[Superblock, tuple[Kept, ...]]]:
    """All readable slot files of a run, with what is sealed in them. What is not readable is named in the log."""
    found = []
    for path, rank in place.slot_paths():
        try:
            examined = examine(path, place, rank, layouts)
        except HoldfastError as error:
            if path.exists():  # else its writer has just removed it
                _log.warning("local tier: a file is passed over: %s", error)
        else:
            found.append((examined.superblock, examined.kept))
    return found


def _pread(file: int, offset: int, nbytes: int) -> bytes:
    done = b""
    while len(done) < nbytes:
        piece = os.pread(file, nbytes - len(done), offset + len(done))
        if not piece:
            break
        done += piece
    return done
