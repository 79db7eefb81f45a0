"""The parts of an image in S3; tests/conformance runs uploads against real servers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StoreError
from holdfast.store.s3_upload import part_bytes_for

_MIB = 1 << 20


@given(st.integers(1, 40 << 40), st.integers(1, 64 * _MIB))
def test_parts_are_whole_chunks_and_within_the_limits_of_s3(nbytes: int, chunk_bytes: int) -> None:
    part_bytes = part_bytes_for(nbytes, chunk_bytes)
    assert part_bytes % chunk_bytes == 0
    assert 5 * _MIB <= part_bytes <= 5 << 30
    assert -(-nbytes // part_bytes) <= 10_000
    smaller = part_bytes - chunk_bytes
    needed = smaller < 5 * _MIB or smaller * 10_000 < nbytes
    wanted = part_bytes * 256 <= nbytes and part_bytes <= min(32 * _MIB, 4 * chunk_bytes)
    assert needed or wanted


@pytest.mark.parametrize(
    ("image_mib", "part_mib"),
    [(307, 16), (1424, 16), (8191, 16), (8192, 32), (300_000, 32), (600_000, 64), (640_001, 80)],
)
def test_parts_grow_with_the_image(image_mib: int, part_mib: int) -> None:
    assert part_bytes_for(image_mib * _MIB, 16 * _MIB) == part_mib * _MIB


def test_two_parts_fit_into_the_least_ring() -> None:
    assert part_bytes_for(100_000 * _MIB, 8 * _MIB) == 4 * 8 * _MIB


@pytest.mark.parametrize(("nbytes", "chunk_bytes"), [(2**62, _MIB), (1, 6 << 30), (0, _MIB), (5, 0)])
def test_an_image_that_no_s3_takes_is_refused(nbytes: int, chunk_bytes: int) -> None:
    with pytest.raises(StoreError, match=str(nbytes)):
        part_bytes_for(nbytes, chunk_bytes)
