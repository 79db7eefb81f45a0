"""How large a ring without a configured size becomes: room for two checkpoints, from at most half of free memory."""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast.process import available_memory_bytes

_IMAGES = 2  # the next one arrives while the last one is written, and a restore finds the last one whole
_SPARE_CHUNKS = 8  # for values that grow, and for the part that an upload needs whole


def wanted_chunks(image_chunks: int) -> int:
    """Return how many slots a ring should have for images of `image_chunks` chunks."""
    return _IMAGES * image_chunks + _SPARE_CHUNKS


def image_chunks_max(ring_chunks: int) -> int:
    """Return how many chunks the largest image may have, so that a ring of `ring_chunks` slots has room for two."""
    return max(0, ring_chunks - _SPARE_CHUNKS) // _IMAGES


def growth_bytes(free_bytes: int, available_bytes: int) -> int:
    """Return by how much a ring may grow: half of the free memory, since others need memory, too. `available_bytes`:
    memory that the kernel and the limits of control groups leave.
    """
    return max(0, min(free_bytes, available_bytes)) // 2


def growth_bytes_in(directory: Path) -> int:
    """Return by how much a ring in this directory may grow now."""
    return growth_bytes(shutil.disk_usage(directory).free, available_memory_bytes())
