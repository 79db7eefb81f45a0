"""Parts under way at once: in order where one is written at a time, within memory, and none begun after a failure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing

import pytest

from holdfast.checkpoints.image_publishing import ChunkFinisher
from holdfast.checkpoints.image_writing import Read, write_parts
from holdfast.checkpoints.publish import Finished
from holdfast.crc import crc32
from holdfast.errors import StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source
from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import Layout
from holdfast.ring.pages import direct_window
from holdfast.store.concurrency import AdaptiveLimit, ConcurrencyLimit

_MODULE = "holdfast.checkpoints.image_writing"
_CHUNK = 4096
_CHUNKS = 64


class _Numbered:
    """An image each of whose bytes is the low byte of its chunk's number."""

    def __init__(self) -> None:
        nbytes = _CHUNKS * _CHUNK
        self.layout = Layout(nbytes, _CHUNK, 2, (Entry("all", 64, nbytes - _CHUNK, REPLICATED, ()),))
        self._finisher = ChunkFinisher(CheckpointId(1, 1), self.layout)

    def senders(self, chunk: int) -> tuple[int, ...]:
        return self.layout.senders(chunk)

    def read_frame(self, chunk: int, rank: int, memory: memoryview, read: Read) -> None:
        for extent in self.layout.pieces(chunk, rank):
            begin = extent.offset - chunk * _CHUNK
            read(rank, extent.offset, memory[begin : begin + extent.nbytes])

    def finish_chunk(self, memory: memoryview) -> int:
        chunk = self._finisher.chunk
        sums = {
            rank: crc32(bytes([chunk]) * sum(extent.nbytes for extent in self.layout.pieces(chunk, rank)))
            for rank in self.senders(chunk)
        }
        return self._finisher.finish(memory, tuple(Source(rank, crc) for rank, crc in sums.items()))

    def finished(self) -> Finished:
        return self._finisher.finished()


class _Taken:
    """Keeps the parts that it was given, and how many were at work at once."""

    part_bytes = 2 * _CHUNK

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.order: list[int] = []
        self.parts: dict[int, bytes] = {}

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        with self._lock:
            self.order.append(index)
            self.parts[index] = b"".join(buffers)


def _fill(rank: int, offset: int, view: memoryview) -> None:
    view[:] = bytes([offset // _CHUNK]) * len(view)


def _measured(width: int) -> ConcurrencyLimit:
    return ConcurrencyLimit(64, AdaptiveLimit(width, least=width, most=64))


@pytest.mark.parametrize(
    "limits",
    [
        (ConcurrencyLimit(4), ConcurrencyLimit(1)),
        (ConcurrencyLimit(8), ConcurrencyLimit(8)),
        (_measured(2), _measured(2)),
    ],
)
def test_every_part_is_written_once(limits: tuple[ConcurrencyLimit, ConcurrencyLimit]) -> None:
    upload, image = _Taken(), _Numbered()
    written = list(write_parts(upload, image, _fill, *limits))
    assert sum(written) == image.layout.image_bytes
    assert sorted(upload.order) == list(range(_CHUNKS // 2))
    if limits[1].most == 1:
        assert upload.order == sorted(upload.order)
    for part, content in upload.parts.items():
        body = content[1024:_CHUNK] + content[_CHUNK + 1024 :]  # besides what precedes the first entry
        assert set(body) <= {0, 2 * part, 2 * part + 1}
    assert len(image.finished().chunk_crc32s) == _CHUNKS


def test_after_a_read_that_failed_those_that_wait_for_a_lane_do_not_begin() -> None:
    failed, upload = 0, _Taken()

    def read(rank: int, offset: int, view: memoryview) -> None:
        nonlocal failed  # one lane: one thread at a time
        if offset >= _CHUNK:
            failed += 1
            raise StoreError("lost")
        _fill(rank, offset, view)

    one = ConcurrencyLimit(64, AdaptiveLimit(1, least=1, most=64))
    with pytest.raises(StoreError, match="lost"):
        list(write_parts(upload, _Numbered(), read, one, ConcurrencyLimit(32)))
    assert failed == 1
    assert not upload.parts


def test_after_a_part_that_failed_no_other_begins() -> None:
    several = threading.Event()

    class Lost(_Taken):
        def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
            self.order.append(index)
            several.wait(10)
            raise StoreError("lost")

    class Told(_Numbered):
        def finish_chunk(self, memory: memoryview) -> int:
            if self._finisher.chunk == 8:  # the four parts before it wait for the lane, or have it
                several.set()
            return super().finish_chunk(memory)

    upload, one = Lost(), ConcurrencyLimit(64, AdaptiveLimit(1, least=1, most=64))
    with pytest.raises(StoreError, match="lost"):
        list(write_parts(upload, Told(), _fill, ConcurrencyLimit(8), one))
    assert len(upload.order) == 1


def test_a_consumer_that_stops_is_the_end_of_it() -> None:
    upload, go, late = _Taken(), threading.Event(), list[int]()

    def read(rank: int, offset: int, view: memoryview) -> None:
        if offset >= 8 * _CHUNK:
            late.append(offset)
            go.wait(10)
        _fill(rank, offset, view)

    with closing(write_parts(upload, _Numbered(), read, ConcurrencyLimit(8), _measured(2))) as parts:
        next(parts)
        threading.Timer(0.5, go.set).start()
    assert len(late) <= 8, "as many as had a lane"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("slices", "image"))]


def test_parts_at_work_are_within_the_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = 5
    made: list[int] = []

    def window(nbytes: int) -> memoryview:
        made.append(nbytes)
        return direct_window(nbytes)

    share_bytes = 2 * buffers * _Taken.part_bytes
    monkeypatch.setattr(f"{_MODULE}.available_memory_bytes", lambda: 4 * share_bytes)
    monkeypatch.setattr(f"{_MODULE}.direct_window", window)
    list(write_parts(_Taken(), _Numbered(), _fill, ConcurrencyLimit(32), ConcurrencyLimit(32)))
    assert made == [_Taken.part_bytes] * buffers
    made.clear()
    list(write_parts(_Taken(), _Numbered(), _fill, ConcurrencyLimit(32), ConcurrencyLimit(1)))
    assert len(made) == 2
