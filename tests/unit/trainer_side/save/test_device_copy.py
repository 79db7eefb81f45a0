"""Gathering, queueing and landing of copies from a device, simulated in host memory; a wait completes an event."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from tests.unit.trainer_side.slices import laid_out, source_of, tensors_of
from trainer_side.save import device_copy as mirrors
from trainer_side.save.copy_plan import BATCH_BYTES_MAX, Batch, Router, SlicePlan, SliceSources, batches
from trainer_side.save.device_copy import DeviceCopy, MirrorRoom
from trainer_side.save.device_stream import DeviceMemory, DeviceStream
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.survey import StorageSource

PLENTY = 1 << 30


class Moment:
    """Position `number` in the stream."""

    def __init__(self, lane: FakeStream, number: int) -> None:
        self._lane, self._number = lane, number

    def synchronize(self) -> None:
        self._lane.waits += 1
        self._lane.reached = max(self._lane.reached, self._number)

    def query(self) -> bool:
        return self._number <= self._lane.reached


class FakeStream(DeviceStream):
    """A stream whose work is done at once, with counters of all calls and at most `room_bytes` of memory."""

    def __init__(self, room_bytes: int = PLENTY, *, by_address: bool = True) -> None:
        self._room_bytes, self._by_address = room_bytes, by_address
        self.made: list[torch.Tensor] = []
        self.events = self.waits = self.reached = self.goes_on = 0

    @contextlib.contextmanager
    def on_own_stream(self, after: StreamEvent | None) -> Iterator[None]:
        yield

    def record_event(self) -> StreamEvent:
        self.events += 1
        return Moment(self, self.events)

    def wait_for_current_stream(self) -> None:
        self.goes_on += 1

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes + self.held_bytes() > self._room_bytes:
            raise torch.OutOfMemoryError("full")
        self.made.append(torch.full((nbytes,), 0xEE, dtype=torch.uint8))
        return self.made[-1]

    def refill(self, emptied: Sequence[torch.Tensor]) -> None:
        for memory in emptied:
            memory.untyped_storage().resize_(memory.numel())
            memory.fill_(0xEE)

    def allocate_on_current_stream(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._room_bytes:
            raise torch.OutOfMemoryError("full")
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def span(self, address: int, nbytes: int) -> torch.Tensor | None:
        if not self._by_address:
            return None
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def held_bytes(self) -> int:
        """Bytes that were allocated and not freed."""
        return sum(memory.untyped_storage().nbytes() for memory in self.made)

    def memory(self) -> DeviceMemory | None:
        return DeviceMemory(2 * PLENTY, PLENTY, 0, 0, 0)


class SourcesOnDevice(SliceSources):
    """Treats all tensors as if they were on a device."""

    @property
    def host_entries(self) -> frozenset[int]:
        return frozenset()


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
        self.slice = SourcesOnDevice(self.plan, self.sources)
        route = Router(self.plan).route(self.sources, dict, order_changed=True).host
        pieces = [piece for batch in route for piece in batch.pieces]
        self.batches = batches(pieces, self.sources, pieces_max=min(256, max(1, len(pieces) // 8)))
        self.area = torch.zeros(self.plan.area_bytes, dtype=torch.uint8)
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

        mirror = engine.mirror((), self.batches, self.slice)
        if mirror is not None:
            on_mirrored()
            engine.copy_mirror(mirror, self.area, cancelled, arrived)
            return
        engine.capture((), self.slice, self.area, gated=self.batches)
        engine.copy(self.batches, self.slice, self.area, None, cancelled, read, arrived)

    def check(self, expected: list[torch.Tensor] | None = None) -> None:
        for entry, tensor in zip(self.entries, expected or self.tensors, strict=True):
            place = slice(entry.offset, entry.offset + entry.nbytes)
            assert self.area[place].equal(tensor), entry.name
        assert not _between(self).any(), "a byte between the tensors, where literals lie, was lost"


def _state() -> State:
    draw = random.Random(3)
    torch.manual_seed(3)
    sizes = [draw.choice([4, 4, 64, 4096, 5000]) for _ in range(700)] + [2 * BATCH_BYTES_MAX + 77]
    draw.shuffle(sizes)
    return State(sizes)


def _between(state: State) -> torch.Tensor:
    """Return the area's bytes between the tensors."""
    between = state.area.clone()
    for entry in state.entries:
        between[entry.offset : entry.offset + entry.nbytes] = 0
    return between


def _engine(lane: FakeStream, mirror_bytes_max: int) -> DeviceCopy:
    return DeviceCopy(lane, MirrorRoom(mirror_bytes_max))


STRATEGIES = pytest.mark.parametrize("mirror_bytes_max", [0, PLENTY], ids=["C", "mirror"])


@STRATEGIES
def test_each_byte_arrives(mirror_bytes_max: int) -> None:
    state = _state()
    assert len(state.batches) > 8, "no slot is used twice"
    engine = _engine(FakeStream(), mirror_bytes_max)
    for _ in range(2):
        state.area.zero_()
        state.told.clear()
        state.copy(engine)
        state.check()
        arrived = [batch for told, batch in state.told if told == "arrived"]
        if not mirror_bytes_max:
            assert arrived == [*state.batches]
        assert sum(len(batch.pieces) for batch in arrived) == len(state.plan.gated)
        read = [batch for told, batch in state.told if told == "read"]
        assert read == ([] if mirror_bytes_max else list(state.batches))
        for batch in read:
            assert state.told.index(("read", batch)) < state.told.index(("arrived", batch))
        for tensor in state.tensors:
            tensor.add_(1)


@STRATEGIES
def test_small_tensors_cross_together(mirror_bytes_max: int) -> None:
    """Each batch has one transfer and one event, not each tensor."""
    state, lane = State([4096] * 10_000), FakeStream()
    state.copy(_engine(lane, mirror_bytes_max))
    state.check()
    assert lane.events <= len(state.batches) + 1 <= 100


def test_without_a_mirror_memory_is_taken_in_save_and_goes_back() -> None:
    """Memory is taken once, except at the first save, when a step's need is unknown; at most that of four batches."""
    state, lane = _state(), FakeStream()
    engine = _engine(lane, 0)
    for save in range(4):
        assert engine.mirror((), state.batches, state.slice) is None
        engine.capture((), state.slice, state.area, gated=state.batches)
        made = len(lane.made)
        assert bool(made) is bool(save)
        assert bool(lane.held_bytes()) is bool(save)
        assert lane.held_bytes() <= 4 * 2 * BATCH_BYTES_MAX
        state.area.zero_()
        engine.copy(
            *(state.batches, state.slice, state.area, None),
            *(lambda: False, lambda _: None, lambda _: None),
        )
        state.check()
        assert len(lane.made) == made
        assert lane.held_bytes() == 0


def test_where_no_copy_follows_the_memory_of_the_device_goes_back_all_the_same() -> None:
    state, lane = _state(), FakeStream()
    engine = _engine(lane, 0)
    for _ in range(2):
        engine.mirror((), state.batches, state.slice)
        engine.capture((), state.slice, state.area, gated=state.batches)()
    assert lane.held_bytes() > 0
    engine.free_memory()
    assert lane.held_bytes() == 0


@pytest.mark.parametrize(("smallest", "sections"), [(4 << 20, 4), (1 << 16, 64)])
def test_a_mirror_crosses_and_is_given_back_section_by_section(
    smallest: int, sections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_SECTION_BYTES", smallest)
    state, lane = State([1 << 18] * 64), FakeStream()
    engine = _engine(lane, PLENTY)
    mirror = engine.mirror((), state.batches, state.slice)
    assert mirror is not None
    assert lane.goes_on == 1
    assert lane.held_bytes() == mirror.nbytes >= 16 << 20
    assert len(lane.made) == sections
    kept: list[int] = []
    engine.copy_mirror(mirror, state.area, lambda: False, lambda _: kept.append(lane.held_bytes()))
    state.check()
    assert len(kept) == sections
    assert sorted(kept, reverse=True) == kept
    assert kept[-1] == 0
    assert kept[0] == mirror.nbytes - lane.made[0].numel()


def test_a_mirror_is_made_again_in_the_same_memory() -> None:
    state, lane = _state(), FakeStream()
    engine = _engine(lane, PLENTY)
    for _ in range(3):
        state.copy(engine)
        state.check()
        assert len(lane.made) == 1
        for tensor in state.tensors:
            tensor.add_(1)


def test_a_cancelled_copys_mirror_goes_back() -> None:
    state, lane = State([1 << 20] * 8), FakeStream()
    engine = _engine(lane, PLENTY)
    mirror = engine.mirror((), state.batches, state.slice)
    assert mirror is not None
    engine.copy_mirror(mirror, state.area, lambda: True, lambda _: None)
    assert lane.held_bytes() == 0


def test_without_room_for_all_there_is_a_mirror_of_what_anything_may_change() -> None:
    """From the second save on: before it, the training's need is unknown."""
    state, lane = State([1 << 20] * 8), FakeStream()
    half = len(state.batches) // 2
    now, behind = state.batches[:half], state.batches[half:]
    now_bytes = sum(batch.nbytes for batch in now)
    engine = _engine(lane, now_bytes + (1 << 20))
    assert engine.mirror(now, behind, state.slice) is None
    mirror = engine.mirror(now, behind, state.slice)
    assert mirror is not None
    assert not mirror.is_full
    assert lane.held_bytes() == mirror.nbytes >= now_bytes
    arrived: list[Batch] = []
    engine.copy_mirror(mirror, state.area, lambda: False, arrived.append)
    assert {piece for batch in arrived for piece in batch.pieces} == {
        piece for batch in now for piece in batch.pieces
    }
    less = _engine(lane, mirror.nbytes - 1)
    assert [less.mirror(now, behind, state.slice) for _ in range(2)] == [None, None]


def test_with_a_mirror_anything_may_change_as_soon_as_it_is_queued() -> None:
    state = _state()
    expected = [tensor.clone() for tensor in state.tensors]

    def update() -> None:
        for tensor in state.tensors:
            tensor.fill_(255)

    state.copy(_engine(FakeStream(), PLENTY), on_mirrored=update)
    assert {what for what, _ in state.told} == {"arrived"}
    state.check(expected)


@pytest.mark.parametrize("limit", [0, 1000])
def test_no_mirror_is_made_above_the_limit(limit: int) -> None:
    state, lane = _state(), FakeStream()
    state.copy(_engine(lane, limit))
    state.check()
    assert lane.made == []


def test_a_device_that_is_full_after_all_is_copied_without_a_mirror(caplog: pytest.LogCaptureFixture) -> None:
    """Each small tensor is transferred separately."""
    state = State([4 << 20, *[4096] * 700, 8 << 20, 4 << 20, 8 << 20])
    lane = FakeStream(0)
    engine = _engine(lane, PLENTY)
    for _ in range(2):
        state.copy(engine)
        state.check()
    assert caplog.text.count("no memory on the device") == 2
    assert lane.made == []


@STRATEGIES
def test_when_a_cancelled_copy_returns_nothing_is_under_way(
    mirror_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_SECTION_BYTES", 1 << 20)
    state, lane = _state(), FakeStream()
    state.copy(_engine(lane, mirror_bytes_max), stop_after=1)
    assert lane.reached == lane.events, "something that was queued is still under way"
    assert sum(what == "arrived" for what, _ in state.told) < len(state.batches)


@STRATEGIES
def test_after_an_error_nothing_writes_to_the_host_any_more(
    mirror_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FakeStream):
        def record_event(self) -> StreamEvent:
            if self.events == 2:
                self.events += 1
                raise RuntimeError("the device says no")
            return super().record_event()

    monkeypatch.setattr(mirrors, "_SECTION_BYTES", 1 << 20)
    state, lane = _state(), Failing()
    with pytest.raises(RuntimeError, match="the device says no"):
        state.copy(_engine(lane, mirror_bytes_max))
    assert lane.reached == lane.events > 3
    between = _between(state)
    assert not between.any(), "what lies between the tensors was lost"


def test_a_capture_is_of_its_moment_in_the_stream() -> None:
    state, lane = _state(), FakeStream()
    engine = _engine(lane, 0)
    captured = batches(state.plan.gated, state.sources)
    for _ in range(2):
        lane.waits = 0
        land = engine.capture(captured, state.slice, state.area)
        assert lane.waits == 0, "save() has waited for the device"
        expected = [tensor.clone() for tensor in state.tensors]
        for tensor in state.tensors:
            tensor.add_(1)
        land()
        assert lane.reached == lane.events
        state.check(expected)


def test_a_capture_on_a_full_device_crosses_tensor_by_tensor() -> None:
    state = _state()
    captured = batches(state.plan.gated, state.sources)
    _engine(FakeStream(0), 0).capture(captured, state.slice, state.area)()
    state.check()


@STRATEGIES
def test_without_views_by_address_each_byte_arrives(mirror_bytes_max: int) -> None:
    """The views are made at each save; tests/late checks that none is kept."""
    state, engine = _state(), _engine(FakeStream(by_address=False), mirror_bytes_max)
    for _ in range(2):
        state.copy(engine)
        state.check()
