"""How large the chunks of a run are, where nobody has said it. Pure.

Each chunk costs stager and flusher some Python, a few messages and three journal writes, whatever its size: 1 TB is
60,000 of 16 MiB. Smaller ones showed no gain, not even for an image of four (67 MB, two ranks, a directory).
"""

from __future__ import annotations

from holdfast.image.layout import CHUNK_BYTES

_LARGE_CHUNK_BYTES = 64 << 20
LARGE_IMAGE_BYTES = 100 * 10**9
_RING_CHUNKS = 64  # fewer, and what comes in waits for what goes out


def chunk_bytes_for(image_bytes: int | None, ring_bytes: int | None) -> int:
    """16 MiB, and 64 MiB for images of 100 GB and more.

    Args:
        image_bytes: Size of the run's newest checkpoint; None: it has none yet.
        ring_bytes: Size of the ring; None: it grows with the image.
    """
    large_fit = ring_bytes is None or ring_bytes >= _RING_CHUNKS * _LARGE_CHUNK_BYTES
    if image_bytes is not None and image_bytes >= LARGE_IMAGE_BYTES and large_fit:
        return _LARGE_CHUNK_BYTES
    return CHUNK_BYTES
