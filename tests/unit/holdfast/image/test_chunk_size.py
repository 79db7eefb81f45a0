"""The default size of chunks."""

from __future__ import annotations

import pytest

from holdfast.image.layout import chunk_bytes_for

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("image_bytes", "ring_bytes", "mebibytes"),
    [
        (None, None, 16),
        (0, None, 16),
        (10**11 - 1, None, 16),
        (10**11, None, 64),
        (10**12, 256 * GIB, 64),
        (10**12, 4 * GIB, 64),
        (10**12, 4 * GIB - 1, 16),
    ],
)
def test_images_of_100_gb_have_larger_chunks_where_the_ring_holds_enough_of_them(
    image_bytes: int | None, ring_bytes: int | None, mebibytes: int
) -> None:
    assert chunk_bytes_for(image_bytes, ring_bytes) == mebibytes * MIB
