"""Reads during writes: half as many bytes, none without writes, and no wait for a hanging store."""

from __future__ import annotations

import threading
import time

import pytest

from flusher.read_pace import ReadPace

MIB = 1 << 20
CHUNK = 16 * MIB
SECONDS_MAX = 60.0


class Reader:
    """Reads chunk after chunk in a thread of its own, as fast as it may."""

    def __init__(self, pace: ReadPace, chunks: int) -> None:
        self.read = 0
        self._pace, self._chunks = pace, chunks
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.read < self._chunks and self._pace.wait(CHUNK):
            self.read += 1

    def reaches(self, chunks: int) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while self.read < chunks and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.read == chunks

    def rests_at(self, chunks: int) -> None:
        """Wait until this many bytes are read, and see that the next one waits."""
        self.reaches(chunks)
        self._thread.join(0.05)
        assert self.read == chunks

    def ends(self) -> None:
        self._thread.join(SECONDS_MAX)
        assert not self._thread.is_alive()


def test_while_nothing_is_written_nothing_waits() -> None:
    reader = Reader(ReadPace(SECONDS_MAX), 100)
    reader.ends()
    assert reader.read == 100


def test_beside_writes_half_as_much_is_read() -> None:
    pace = ReadPace(SECONDS_MAX)
    pace.set_busy(True)
    reader = Reader(pace, 100)
    reader.rests_at(0)
    for written in range(1, 41):
        pace.add_written(CHUNK)
        reader.reaches((written + 1) // 2)  # the first of two allows a read that the second one pays for
    reader.rests_at(20)
    pace.set_busy(False)
    reader.ends()


@pytest.mark.parametrize("written_bytes", [CHUNK, 512 * MIB])
def test_bytes_written_before_the_first_read_are_not_made_up_for(written_bytes: int) -> None:
    pace = ReadPace(SECONDS_MAX)
    pace.set_busy(True)
    for _ in range(100):
        pace.add_written(written_bytes)
    reader = Reader(pace, 1000)
    reader.rests_at(max(64 * MIB, written_bytes // 2) // CHUNK)
    pace.end()
    reader.ends()


def test_a_store_that_takes_nothing_holds_no_read_back() -> None:
    pace = ReadPace(0.01)
    pace.set_busy(True)
    reader = Reader(pace, 5)
    reader.ends()
    assert reader.read == 5


def test_ending_the_pace_ends_waiting_readers() -> None:
    pace = ReadPace(SECONDS_MAX)
    pace.set_busy(True)
    reader = Reader(pace, 5)
    pace.end()
    reader.ends()
    assert reader.read == 0
