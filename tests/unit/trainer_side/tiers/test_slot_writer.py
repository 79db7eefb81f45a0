"""One slice in flight: what is written for it, and races between threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.image.slices import frames_of
from tests.support.tiers import RUN, aligned, image, put, slice_of
from tests.unit.trainer_side.slices import laid_out
from trainer_side.tiers.medium import CachedFile
from trainer_side.tiers.slot_tier import SlotTier
from trainer_side.tiers.tier import Nearness
from trainer_side.tiers.tier_directory import TierDirectory


class _Counting(CachedFile):
    """Counts what goes to the device; `hold` keeps writers from it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written, self.flushes, self.closed = 0, 0, False
        self.free, self.entered = threading.Event(), threading.Event()
        self.free.set()
        _media.append(self)

    def write(self, offset: int, view: memoryview) -> None:
        self.entered.set()
        assert self.free.wait(60)
        self.written += view.nbytes
        super().write(offset, view)

    def flush(self) -> None:
        self.flushes += 1
        super().flush()

    def close(self) -> None:
        self.closed = True
        super().close()


_media: list[_Counting] = []


@pytest.fixture
def tier(tmp_path: Path) -> SlotTier:
    _media.clear()
    return SlotTier(
        "test", Nearness.FILE, TierDirectory(tmp_path / "tier", RUN), _Counting, slots=2, writers=1
    )


def test_hardly_more_is_written_than_there_is(tier: SlotTier) -> None:
    layout = laid_out([20 << 20, 7, 300_000, 13 << 20], chunk_bytes=4 << 20)
    tier.prepare(layout, 0)
    (medium,) = _media
    for step in (1, 2, 3, 4):
        medium.written = medium.flushes = 0
        writer = tier.begin(1, step)
        assert writer is not None
        assert medium.written == medium.flushes == 0, "begin costs the training thread nothing of the device"
        for number, frame in enumerate(frames_of(layout, 0)):
            writer.write(number, aligned(b"", frame.padded_bytes), 0)
        assert writer.seal({})
        tier.complete(1, step)
        assert medium.written <= 1.01 * layout.slice_bytes(0)
        assert medium.flushes == (4 if step > 2 else 3)  # slice and seal, record, complete; and the unsealing
    tier.close()


def test_an_abandoned_slot_is_free_when_its_last_write_is_over(tier: SlotTier) -> None:
    made = image()
    tier.prepare(made.layout, 0)
    (medium,) = _media
    first, second = tier.begin(1, 1), tier.begin(1, 2)
    assert first is not None
    assert second is not None
    medium.entered.clear()
    medium.free.clear()
    thread = threading.Thread(target=put, args=(first, made.layout, 0, 0, slice_of(made, 0)[0]))
    thread.start()
    assert medium.entered.wait(60)
    with pytest.raises(StoreError, match=r"missing|on their way"):
        first.seal({})
    first.abandon()
    assert tier.begin(1, 3) is None, "its bytes are still on their way into the slot"
    medium.free.set()
    thread.join()
    assert tier.begin(1, 3) is not None
    tier.close()


def test_a_file_is_closed_when_its_last_writer_is_through(tier: SlotTier) -> None:
    made = image()
    tier.prepare(made.layout, 0)
    writer = tier.begin(1, 1)
    assert writer is not None
    put(writer, made.layout, 0, 0, slice_of(made, 0)[0])
    tier.close()
    (medium,) = _media
    assert not medium.closed
    writer.abandon()
    assert medium.closed


def test_a_slot_is_unsealed_once_and_by_the_first_of_its_frames(tier: SlotTier) -> None:
    made = image()
    tier.prepare(made.layout, 0)
    (medium,) = _media
    for step in (1, 2):
        writer = tier.begin(1, step)
        assert writer is not None
        for number, data in enumerate(slice_of(made, 0, step)):
            put(writer, made.layout, 0, number, data)
        assert writer.seal({})
        tier.complete(1, step)
    writer = tier.begin(1, 3)
    assert writer is not None
    before = medium.flushes
    threads = [
        threading.Thread(target=put, args=(writer, made.layout, 0, number, data))
        for number, data in enumerate(slice_of(made, 0, 3))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert medium.flushes == before + 1
    writer.abandon()
    tier.close()
