"""Checkpoint contents for the simulation: true zip files of a few pages, one for each (job, step), cut into layouts.

In some worlds tensors are split among the ranks: rows, columns or boxes, with or without replicas, short or empty
shards, beside tensors that every rank holds whole.
"""

from __future__ import annotations

import functools
import io
import random
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from tests.support.images import Image, from_torch_file
from tests.support.split_images import cut_up

__all__ = ["CHUNK_BYTES", "SHAPES", "image"]

CHUNK_BYTES = 4096
# Sizes of the tensors' entries in bytes: from three chunks up to more than a ring of eight.
SHAPES = (
    (5000, 3000, 1),
    (9000, 200, 4096, 0),
    (16000, 100),
    (300, 300, 300, 11000, 5000),
    (4000, 4000, 4000, 4000, 4000, 4000),
    (30000, 6000, 50),
)


class _Stream(io.RawIOBase):
    """A stream that cannot seek, so that zipfile writes data descriptors as torch does."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(data)  # type: ignore[arg-type]


@functools.cache
def image(shape: int, ranks: int, mesh: int, variant: int) -> Image:
    """The image of one checkpoint. `variant` affects only the bytes, the other arguments also the layout.

    Args:
        shape: One of `SHAPES`.
        ranks: Number of ranks.
        mesh: Seed for splitting tensors among the ranks; 0: no split.
        variant: Seed for the bytes.
    """
    chance = random.Random((shape, ranks, variant).__hash__())
    stream = _Stream()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), chance.randbytes(700))
        for number, nbytes in enumerate(SHAPES[shape]):
            archive.writestr(zipfile.ZipInfo(f"archive/data/{number}"), chance.randbytes(nbytes))
    with tempfile.NamedTemporaryFile() as file:
        file.write(stream.data)
        file.flush()
        found = from_torch_file(Path(file.name), chunk_bytes=CHUNK_BYTES, ranks=ranks)
    # One small entry near the end belongs to rank 0, as a `PerRank` value may: its chunk then has two senders.
    entries = list(found.layout.entries)
    small = max(n for n, entry in enumerate(entries) if 0 < entry.nbytes < 8192)
    entries[small] = replace(entries[small], owner=0)
    made = Image(replace(found.layout, entries=tuple(entries)), found.final, found.sent)
    return cut_up(made, random.Random(f"mesh {mesh} {shape} {ranks}"), share=0.8) if mesh else made
