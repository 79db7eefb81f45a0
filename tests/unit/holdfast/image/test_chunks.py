"""Many small tensors in one chunk: true CRCs are put in by passes over their list, not by one for each segment."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from holdfast.crc import crc32
from holdfast.image.chunks import PatchJob, patch_chunk
from holdfast.image.manifest import Key

_SEGMENTS, _SEGMENT_BYTES = 500, 16


class _Counted(tuple[tuple[int, bytes], ...]):
    """Counts how often it was gone through."""

    __slots__ = ()
    passes: list[None] = []  # noqa: RUF012

    def __iter__(self) -> Iterator[Any]:
        self.passes.append(None)
        return super().__iter__()


def test_each_value_is_put_into_its_segment_in_a_fixed_number_of_passes() -> None:
    memory = bytearray(_SEGMENTS * _SEGMENT_BYTES)
    segments = [
        SimpleNamespace(offset=number * _SEGMENT_BYTES, nbytes=_SEGMENT_BYTES) for number in range(_SEGMENTS)
    ]
    clean = crc32(bytes(_SEGMENT_BYTES))
    # Two values in each segment, at its begin and at its end, in an order that is not that of the file.
    places = [place for one in segments for place in (one.offset, one.offset + _SEGMENT_BYTES - 4)]
    values = _Counted((place, place.to_bytes(4, "little")) for place in reversed(places))
    layout = SimpleNamespace(chunk_bytes=len(memory), segments=lambda _chunk: segments)
    job = SimpleNamespace(
        key=Key(1, 1),
        chunk=0,
        values=values,
        touched=tuple(range(_SEGMENTS)),
        verified_crcs=(clean,) * _SEGMENTS,
        index=SimpleNamespace(layout=layout),
    )
    _Counted.passes.clear()
    changed = patch_chunk(memoryview(memory), cast(PatchJob, job))
    assert len(_Counted.passes) <= 2
    for place in places:
        assert memory[place : place + 4] == place.to_bytes(4, "little")
    assert changed == tuple(
        (number, crc32(memory[one.offset : one.offset + _SEGMENT_BYTES]))
        for number, one in enumerate(segments)
    )
