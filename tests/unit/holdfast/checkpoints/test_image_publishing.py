"""Parts in flight: in order for one writer, within memory, and none begun after a failure."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import closing

import pytest

from holdfast.checkpoints.image_publishing import ChunkFinisher, write_image
from holdfast.errors import StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import Layout
from holdfast.ring.pages import aligned_buffer
from holdfast.store.concurrency import AdaptiveLimit, ConcurrencyLimit
from holdfast.store.parts import BaseUpload

_MODULE = "holdfast.checkpoints.image_publishing"
_CHUNK = 4096
_CHUNKS = 64
_NBYTES = _CHUNKS * _CHUNK


class _Numbered:
    """An image each of whose bytes is the low byte of its chunk's number; the first 64 belong to no entry."""

    layout = Layout(_NBYTES, _CHUNK, 1, (Entry("all", 64, _NBYTES - _CHUNK, REPLICATED, ()),))

    def __init__(self) -> None:
        self.made: list[int] = []

    def write_chunk(self, chunk: int, memory: memoryview) -> None:
        self.made.append(chunk)
        memory[:] = bytes([chunk]) * len(memory)


class _Taken(BaseUpload):
    """Keeps the parts that it was given, in their order."""

    token = None

    def __init__(self) -> None:
        super().__init__("image", nbytes=_NBYTES, part_bytes=2 * _CHUNK)
        self.order: list[int] = []
        self.parts: dict[int, bytes] = {}

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        with self._ledger.track_part(index, buffers):
            self.order.append(index)
            self.parts[index] = b"".join(buffers)

    def publish(self) -> None: ...

    def abort(self) -> None: ...


def _measured(width: int) -> ConcurrencyLimit:
    return ConcurrencyLimit(64, AdaptiveLimit(width, minimum=width, maximum=64))


def _written(
    upload: _Taken, limit: ConcurrencyLimit, image: _Numbered | None = None
) -> Generator[int, None, None]:
    image = image or _Numbered()
    return write_image(upload, image, ChunkFinisher(CheckpointId(1, 1), image.layout), limit)


@pytest.mark.parametrize("limit", [ConcurrencyLimit(1), ConcurrencyLimit(8), _measured(2)])
def test_every_part_is_written_once(limit: ConcurrencyLimit) -> None:
    upload, image = _Taken(), _Numbered()
    finisher = ChunkFinisher(CheckpointId(1, 1), image.layout)
    assert sum(write_image(upload, image, finisher, limit)) == _NBYTES
    assert sorted(upload.order) == list(range(_CHUNKS // 2))
    if limit.maximum == 1:
        assert upload.order == sorted(upload.order)
    for part, content in upload.parts.items():
        assert content == bytes([2 * part]) * _CHUNK + bytes([2 * part + 1]) * _CHUNK
    assert len(finisher.finished_image().chunk_crc32s) == _CHUNKS


def test_after_a_part_that_failed_no_other_begins() -> None:
    several = threading.Event()

    class Lost(_Taken):
        def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
            self.order.append(index)
            several.wait(10)
            raise StoreError("lost")

    class Told(_Numbered):
        def write_chunk(self, chunk: int, memory: memoryview) -> None:
            if (
                chunk == 2
            ):  # the part before it has the one request that is allowed, and the next will wait for it
                several.set()
            super().write_chunk(chunk, memory)

    upload = Lost()
    with pytest.raises(StoreError, match="lost"):
        list(_written(upload, ConcurrencyLimit(64, AdaptiveLimit(1, minimum=1, maximum=64)), Told()))
    assert len(upload.order) == 1


def test_a_consumer_that_stops_ends_the_writing() -> None:
    upload, image = _Taken(), _Numbered()
    with closing(_written(upload, _measured(2), image)) as parts:
        next(parts)
    assert len(image.made) < _CHUNKS
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("image")]


def test_parts_at_work_are_within_the_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = 5
    made: list[int] = []

    def window(nbytes: int) -> memoryview:
        made.append(nbytes)
        return aligned_buffer(nbytes)

    share_bytes = 2 * buffers * 2 * _CHUNK
    monkeypatch.setattr(f"{_MODULE}.available_memory_bytes", lambda: 4 * share_bytes)
    monkeypatch.setattr(f"{_MODULE}.aligned_buffer", window)
    list(_written(_Taken(), ConcurrencyLimit(32)))
    assert made == [2 * _CHUNK] * buffers
    made.clear()
    list(_written(_Taken(), ConcurrencyLimit(1)))
    assert len(made) == 2
