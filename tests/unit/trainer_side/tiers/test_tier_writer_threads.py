"""The threads of a tier: how many wake up for a ready frame."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.image.save_record import SaveRecord
from trainer_side.tiers import tier_writer_threads
from trainer_side.tiers.tier import Tier
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.tiers.tier_writer_threads import TierWriterThreads

FRAMES, FRAME_BYTES, THREADS = 40, 8, 6
SECONDS_MAX = 60.0


class _Area:
    """Frames get ready one by one."""

    def __init__(self) -> None:
        self.ready: set[int] = set()

    def is_ready(self, offset: int) -> bool:
        return offset in self.ready

    def is_complete(self) -> bool:
        return len(self.ready) == FRAMES

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(bytes(FRAMES * FRAME_BYTES))[offset : offset + nbytes]


class _Writer:
    """Records its frames."""

    memory = copy = None

    def __init__(self) -> None:
        self.written: list[int] = []
        self.sealed = False

    def write(self, frame: int, _buffer: memoryview, _crc32: int) -> None:
        self.written.append(frame)

    def seal(self, _record: Mapping[str, Any]) -> bool:
        self.sealed = True
        return True


def _wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def test_a_ready_frame_wakes_two_threads_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writer_threads, "_UNTOLD_SECONDS", SECONDS_MAX)  # only who is woken looks
    looks: list[TierWriterThreads] = []
    real = TierWriterThreads._next

    def counted(threads: TierWriterThreads) -> Any:
        looks.append(threads)
        return real(threads)

    monkeypatch.setattr(TierWriterThreads, "_next", counted)
    area, writer = _Area(), _Writer()
    frames = tuple(
        SimpleNamespace(offset=FRAME_BYTES * number, nbytes=FRAME_BYTES, padded_bytes=FRAME_BYTES)
        for number in range(FRAMES)
    )
    write = TierWrite((1, 0), cast(Any, frames), SaveRecord(), {0: cast(Any, writer)}, area=cast(Any, area))
    threads = TierWriterThreads(
        0, cast(Tier, SimpleNamespace(name="memory:/x")), 0, lambda _: None, call_seconds_max=SECONDS_MAX
    )
    threads.ensure_threads(THREADS)
    threads.keep(write)
    for frame in frames:
        area.ready.add(frame.offset)
        write.nudge()
        _wait_for(lambda: len(writer.written) == len(area.ready))
    assert write.released.wait(SECONDS_MAX)
    assert threads.close(SECONDS_MAX)
    assert writer.written == list(range(FRAMES))
    assert writer.sealed
    # The one that takes the frame looks before and after; it wakes one more, which finds nothing.
    # Threads that an earlier test has left hanging look, too.
    assert sum(each is threads for each in looks) <= 3 * FRAMES + 6 * THREADS
