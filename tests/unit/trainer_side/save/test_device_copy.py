"""Gathering, queueing and landing of copies from a device, played on host memory; events strike when waited for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.unit.trainer_side.slices import laid_out, source_of, tensors_of
from trainer_side.save.copy_plan import BATCH_BYTES_MAX, Batch, Router, SlicePlan, batches
from trainer_side.save.device_copy import DeviceCopy, StreamEvent
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
    """A stream whose work is done at once; counts what was asked of it."""

    def __init__(self, spare_bytes: int = 0) -> None:
        self._spare_bytes = spare_bytes
        self.device_bytes: list[int] = []
        self.host_bytes: list[int] = []
        self.events = self.waits = self.reached = 0

    @contextlib.contextmanager
    def beside(self, after: StreamEvent | None) -> Iterator[None]:
        yield

    def record(self) -> StreamEvent:
        self.events += 1
        return Moment(self, self.events)

    def on_device(self, nbytes: int) -> torch.Tensor:
        self.device_bytes.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def on_host(self, nbytes: int) -> torch.Tensor:
        self.host_bytes.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def spare_bytes(self) -> int:
        return self._spare_bytes


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
        self, engine: DeviceCopy, *, stop_after: int = 10**9, on_read: Callable[[], None] = lambda: None
    ) -> None:
        def read(batch: Batch) -> None:
            self.told.append(("read", batch))
            on_read()

        engine.copy(
            self.batches,
            self.sources,
            self.area,
            None,
            lambda: len(self.told) >= stop_after,
            read,
            lambda batch: self.told.append(("arrived", batch)),
        )

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


@pytest.mark.parametrize("spare_bytes", [0, PLENTY], ids=["C", "G"])
def test_each_byte_arrives_and_is_read_before(spare_bytes: int) -> None:
    state = _state()
    assert len(state.batches) > 8, "no slot is used twice"
    engine = DeviceCopy(FakeLane(spare_bytes))
    for _ in range(2):
        state.area.zero_()
        state.told.clear()
        state.copy(engine)
        state.check()
        for what in ("read", "arrived"):
            assert [batch for told, batch in state.told if told == what] == list(state.batches)
        for batch in state.batches:
            assert state.told.index(("read", batch)) < state.told.index(("arrived", batch))
        for tensor in state.tensors:
            tensor.add_(1)


def test_small_tensors_cross_together() -> None:
    """One crossing and one event for each batch, not for each tensor."""
    state, lane = State([4096] * 10_000), FakeLane()
    state.copy(DeviceCopy(lane))
    state.check()
    assert lane.events == len(state.batches) <= 100


@pytest.mark.parametrize("spare_bytes", [0, PLENTY], ids=["C", "G"])
def test_its_own_memory_is_taken_once_and_bounded(spare_bytes: int) -> None:
    state, lane = _state(), FakeLane(spare_bytes)
    engine = DeviceCopy(lane)
    for _ in range(3):
        state.copy(engine)
    assert lane.host_bytes == [SLOTS_BYTES]
    (device_bytes,) = lane.device_bytes
    gated_bytes = sum(piece.nbytes for piece in state.plan.gated)
    if spare_bytes:
        assert gated_bytes <= device_bytes <= gated_bytes + 512 * len(state.batches)
    else:
        assert device_bytes == SLOTS_BYTES


def test_with_a_mirror_updates_go_on_before_anything_has_crossed() -> None:
    state = _state()
    expected = [tensor.clone() for tensor in state.tensors]
    reads = 0

    def update() -> None:
        nonlocal reads
        reads += 1
        if reads == len(state.batches):  # the gate is open
            for tensor in state.tensors:
                tensor.fill_(255)

    state.copy(DeviceCopy(FakeLane(PLENTY)), on_read=update)
    count = len(state.batches)
    assert [what for what, _ in state.told] == ["read"] * count + ["arrived"] * count
    state.check(expected)


@pytest.mark.parametrize("device_bytes_max", [0, 1000])
def test_no_mirror_is_made_above_the_limit(device_bytes_max: int) -> None:
    state, lane = _state(), FakeLane(PLENTY)
    state.copy(DeviceCopy(lane, device_bytes_max=device_bytes_max))
    state.check()
    assert lane.device_bytes == [SLOTS_BYTES]


def test_a_device_that_is_full_after_all_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Full(FakeLane):
        def on_device(self, nbytes: int) -> torch.Tensor:
            if nbytes != SLOTS_BYTES:
                raise torch.OutOfMemoryError("full")
            return super().on_device(nbytes)

    state, engine = _state(), DeviceCopy(Full(PLENTY))
    for _ in range(2):
        state.copy(engine)
    state.check()
    assert caplog.text.count("no memory on the device") == 1


@pytest.mark.parametrize("spare_bytes", [0, PLENTY], ids=["C", "G"])
def test_when_a_cancelled_copy_returns_nothing_is_read_any_more(spare_bytes: int) -> None:
    state, lane = _state(), FakeLane(spare_bytes)
    state.copy(DeviceCopy(lane), stop_after=1)
    assert lane.reached == lane.events, "something that was queued is still under way"
    assert sum(what == "arrived" for what, _ in state.told) < len(state.batches)


def test_what_is_captured_is_of_that_moment_in_the_stream() -> None:
    state, lane = _state(), FakeLane()
    engine = DeviceCopy(lane)
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
