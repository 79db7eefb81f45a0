"""Gathering, queueing and landing of copies from a device, played on host memory; events strike when waited for."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.unit.trainer_side.slices import laid_out, source_of, tensors_of
from trainer_side.save import device_copy
from trainer_side.save.copy_plan import BATCH_BYTES_MAX, Batch, Router, SlicePlan, batches
from trainer_side.save.device_copy import DeviceCopy
from trainer_side.save.device_lane import DeviceMemory
from trainer_side.save.mirror_room import MirrorRoom
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.survey import StorageSource

SLOTS_BYTES = 8 * BATCH_BYTES_MAX
PLENTY = 1 << 30


class Moment:
    """Place `number` in the stream."""

    def __init__(self, lane: FakeLane, number: int) -> None:
        self._lane, self._number = lane, number

    def synchronize(self) -> None:
        self._lane.waits += 1
        self._lane.reached = max(self._lane.reached, self._number)


class FakeLane:
    """A stream whose work is done at once; counts what was asked of it. It has memory for `room_bytes`, at most."""

    def __init__(self, room_bytes: int = PLENTY) -> None:
        self._room_bytes = room_bytes
        self.device_bytes: list[int] = []
        self.kept_bytes = self.held_bytes = 0  # of those; by tensors, and till somebody waits
        self.host_bytes: list[int] = []
        self.events = self.waits = self.reached = self.goes_on = 0

    @contextlib.contextmanager
    def beside(self, after: StreamEvent | None) -> Iterator[None]:
        yield

    def record(self) -> StreamEvent:
        self.events += 1
        return Moment(self, self.events)

    def go_on(self) -> None:
        self.goes_on += 1

    def drain(self) -> None:
        self.reached, self.held_bytes = self.events, self.kept_bytes

    def on_device(self, nbytes: int) -> torch.Tensor:
        if nbytes + self.kept_bytes > self._room_bytes:
            raise torch.OutOfMemoryError("full")
        self.device_bytes.append(nbytes)
        self.kept_bytes += nbytes
        self.held_bytes += nbytes
        memory = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        weakref.finalize(memory, self._let_go, nbytes)
        return memory

    def _let_go(self, nbytes: int) -> None:
        self.kept_bytes -= nbytes

    def on_host(self, nbytes: int) -> torch.Tensor:
        self.host_bytes.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def memory(self) -> DeviceMemory | None:
        return DeviceMemory(2 * self._room_bytes, self._room_bytes, 0, 0, 0)


class State:
    """Tensors of many sizes, their batches, and an area for them."""

    def __init__(self, sizes: list[int]) -> None:
        layout = laid_out(sizes)
        self.entries = layout.entries
        self.plan = SlicePlan.of(layout, 0, [True] * len(sizes))
        self.tensors = tensors_of(sizes)
        self.sources: list[StorageSource | None] = [
            source_of(entry, tensor) for entry, tensor in enumerate(self.tensors)
        ]
        self.batches = Router(self.plan).route(self.sources, dict, order_changed=True).host
        self.area = torch.zeros(self.plan.nbytes, dtype=torch.uint8)
        self.told: list[tuple[str, Batch]] = []

    def copy(
        self,
        engine: DeviceCopy,
        *,
        stop_after: int = 10**9,
        on_mirrored: Callable[[], None] = lambda: None,
    ) -> None:
        def read(batch: Batch) -> None:
            self.told.append(("read", batch))

        def cancelled() -> bool:
            return len(self.told) >= stop_after

        def arrived(batch: Batch) -> None:
            self.told.append(("arrived", batch))

        mirror = engine.mirror((), self.batches, self.sources)
        if mirror is not None:
            on_mirrored()
            engine.bring(mirror, self.area, cancelled, arrived)
            return
        engine.capture((), self.sources, self.area, behind=self.batches)
        engine.copy(self.batches, self.sources, self.area, None, cancelled, read, arrived)

    def check(self, expected: list[torch.Tensor] | None = None) -> None:
        between = torch.ones(len(self.area), dtype=torch.bool)
        for entry, tensor in zip(self.entries, expected or self.tensors, strict=True):
            place = slice(entry.offset, entry.offset + entry.nbytes)
            assert self.area[place].equal(tensor), entry.name
            between[place] = False
        assert not self.area[between].any(), "a byte between the tensors, where literals lie, was written"


def _state() -> State:
    draw = random.Random(3)
    torch.manual_seed(3)
    sizes = [draw.choice([4, 4, 64, 4096, 5000]) for _ in range(700)] + [2 * BATCH_BYTES_MAX + 77]
    draw.shuffle(sizes)
    return State(sizes)


def _engine(lane: FakeLane, mirror_bytes_max: int) -> DeviceCopy:
    return DeviceCopy(lane, MirrorRoom(mirror_bytes_max))


STRATEGIES = pytest.mark.parametrize("mirror_bytes_max", [0, PLENTY], ids=["C", "mirror"])


@STRATEGIES
def test_each_byte_arrives(mirror_bytes_max: int) -> None:
    state = _state()
    assert len(state.batches) > 8, "no slot is used twice"
    engine = _engine(FakeLane(), mirror_bytes_max)
    for _ in range(2):
        state.area.zero_()
        state.told.clear()
        state.copy(engine)
        state.check()
        assert [batch for told, batch in state.told if told == "arrived"] == list(state.batches)
        read = [batch for told, batch in state.told if told == "read"]
        assert read == ([] if mirror_bytes_max else list(state.batches))
        for batch in read:
            assert state.told.index(("read", batch)) < state.told.index(("arrived", batch))
        for tensor in state.tensors:
            tensor.add_(1)


@STRATEGIES
def test_small_tensors_cross_together(mirror_bytes_max: int) -> None:
    """One crossing and one event for each batch, not for each tensor."""
    state, lane = State([4096] * 10_000), FakeLane()
    state.copy(_engine(lane, mirror_bytes_max))
    state.check()
    assert lane.events <= len(state.batches) + 1 <= 100


def test_without_a_mirror_memory_is_taken_in_save_and_that_of_the_device_goes_back() -> None:
    """Once of the host; of the device at each save but the first, when nobody knows what a step takes."""
    state, lane = _state(), FakeLane()
    engine = _engine(lane, 0)
    for save in range(4):
        assert engine.mirror((), state.batches, state.sources) is None
        engine.capture((), state.sources, state.area, behind=state.batches)
        taken = lane.host_bytes, lane.device_bytes
        assert taken == ([SLOTS_BYTES], save * [SLOTS_BYTES])
        assert lane.held_bytes == (SLOTS_BYTES if save else 0)
        state.area.zero_()
        engine.copy(
            *(state.batches, state.sources, state.area, None),
            *(lambda: False, lambda _: None, lambda _: None),
        )
        state.check()
        assert (lane.host_bytes, lane.device_bytes) == taken
        assert lane.held_bytes == 0


def test_where_no_copy_follows_the_memory_of_the_device_goes_back_all_the_same() -> None:
    state, lane = _state(), FakeLane()
    engine = _engine(lane, 0)
    for _ in range(2):
        engine.mirror((), state.batches, state.sources)
        engine.capture((), state.sources, state.area, behind=state.batches)()
    assert lane.held_bytes == SLOTS_BYTES
    engine.give_back()
    assert lane.held_bytes == 0


@pytest.mark.parametrize(("smallest", "calls"), [(32 << 20, 4), (1 << 20, 16)])
def test_a_mirror_is_given_back_piece_by_piece(
    smallest: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "_SECTION_BYTES", smallest)
    state, lane = State([1 << 20] * 128), FakeLane()
    engine = _engine(lane, PLENTY)
    mirror = engine.mirror((), state.batches, state.sources)
    assert mirror is not None
    assert lane.goes_on == 1
    assert lane.kept_bytes == sum(lane.device_bytes) == 128 << 20
    assert len(lane.device_bytes) == calls
    kept: list[int] = []
    engine.bring(mirror, state.area, lambda: False, lambda _: kept.append(lane.kept_bytes))
    state.check()
    assert kept[0] >= (128 << 20) - lane.device_bytes[0]
    assert kept[-1] == lane.device_bytes[-1], "all of it was kept until the end"
    assert sorted(kept, reverse=True) == kept
    assert lane.held_bytes == 0


def test_what_a_cancelled_copy_has_left_of_a_mirror_goes_back() -> None:
    state, lane = State([1 << 20] * 128), FakeLane()
    engine = _engine(lane, PLENTY)
    mirror = engine.mirror((), state.batches, state.sources)
    assert mirror is not None
    engine.bring(mirror, state.area, lambda: True, lambda _: None)
    assert lane.held_bytes == 0


def test_without_room_for_all_there_is_a_mirror_of_what_anything_may_change() -> None:
    """From the second save on: before, nobody knows what training takes."""
    state, lane = State([1 << 20] * 8), FakeLane()
    half = len(state.batches) // 2
    now, behind = state.batches[:half], state.batches[half:]
    now_bytes = sum(batch.nbytes for batch in now)
    engine = _engine(lane, now_bytes)
    assert engine.mirror(now, behind, state.sources) is None
    mirror = engine.mirror(now, behind, state.sources)
    assert mirror is not None
    assert not mirror.is_whole
    assert lane.device_bytes == [now_bytes]
    arrived: list[Batch] = []
    engine.bring(mirror, state.area, lambda: False, arrived.append)
    assert arrived == [*now]
    less = _engine(lane, now_bytes - 1)
    assert [less.mirror(now, behind, state.sources) for _ in range(2)] == [None, None]


def test_with_a_mirror_anything_may_change_as_soon_as_it_is_queued() -> None:
    state = _state()
    expected = [tensor.clone() for tensor in state.tensors]

    def update() -> None:
        for tensor in state.tensors:
            tensor.fill_(255)

    state.copy(_engine(FakeLane(), PLENTY), on_mirrored=update)
    assert [what for what, _ in state.told] == ["arrived"] * len(state.batches)
    state.check(expected)


@pytest.mark.parametrize("limit", [0, 1000])
def test_no_mirror_is_made_above_the_limit(limit: int) -> None:
    state, lane = _state(), FakeLane()
    state.copy(_engine(lane, limit))
    state.check()
    assert lane.device_bytes == []


def test_a_device_that_is_full_after_all_is_copied_without_a_mirror(caplog: pytest.LogCaptureFixture) -> None:
    """Each small tensor crosses by itself."""
    state = State([4 << 20, *[4096] * 700, 8 << 20, 4 << 20, 8 << 20])
    lane = FakeLane(0)
    engine = _engine(lane, PLENTY)
    for _ in range(2):
        state.copy(engine)
        state.check()
    assert caplog.text.count("no memory on the device") == 2
    assert lane.device_bytes == []


@STRATEGIES
def test_when_a_cancelled_copy_returns_nothing_is_under_way(mirror_bytes_max: int) -> None:
    state, lane = _state(), FakeLane()
    state.copy(_engine(lane, mirror_bytes_max), stop_after=1)
    assert lane.reached == lane.events, "something that was queued is still under way"
    assert sum(what == "arrived" for what, _ in state.told) < len(state.batches)


@STRATEGIES
def test_after_an_error_nothing_writes_to_the_host_any_more(mirror_bytes_max: int) -> None:
    class Failing(FakeLane):
        def record(self) -> StreamEvent:
            if self.events == 5:
                self.events += 1
                raise RuntimeError("the device says no")
            return super().record()

    state, lane = _state(), Failing()
    with pytest.raises(RuntimeError, match="the device says no"):
        state.copy(_engine(lane, mirror_bytes_max))
    assert lane.reached == lane.events > 6


def test_what_is_captured_is_of_that_moment_in_the_stream() -> None:
    state, lane = _state(), FakeLane()
    engine = _engine(lane, 0)
    captured = batches(state.plan.gated, state.sources)
    for _ in range(2):
        lane.waits = 0
        land = engine.capture(captured, state.sources, state.area)
        assert lane.waits == 0, "save() has waited for the device"
        expected = [tensor.clone() for tensor in state.tensors]
        for tensor in state.tensors:
            tensor.add_(1)
        land()
        assert lane.reached == lane.events
        state.check(expected)
    assert len(lane.host_bytes) == 1


def test_what_is_captured_on_a_full_device_crosses_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    state = _state()
    captured = batches(state.plan.gated, state.sources)
    monkeypatch.setattr(torch, "cat", full)
    _engine(FakeLane(0), 0).capture(captured, state.sources, state.area)()
    state.check()
