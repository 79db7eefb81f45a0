"""As many checkpoints in flight as areas; no area is used while it is read, or made before it is needed."""

from __future__ import annotations

import gc
import weakref
from typing import cast

import pytest

from holdfast.errors import ConfigError
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import area_bytes
from tests.unit.trainer_side.slices import laid_out
from trainer_side.save.staging import Staging
from trainer_side.save.staging_pool import Areas, areas_max
from trainer_side.transfer import Transfer, TransferState


class FakeStaging:
    area_bytes = 10


class Made:
    """Makes areas and remembers them, without keeping them."""

    def __init__(self) -> None:
        self.areas: list[weakref.ref[FakeStaging]] = []

    def __call__(self, _slot: object = None) -> Staging:
        area = FakeStaging()
        self.areas.append(weakref.ref(area))
        return cast(Staging, area)


def _pool(count_max: int) -> tuple[Areas, Made]:
    areas, made = Areas(), Made()
    areas.reset(made, count_max)
    return areas, made


def _send(areas: Areas, step: int) -> Transfer:
    area = areas.acquire()
    assert area is not None
    transfer = Transfer(step, SaveRecord())
    areas.send(area, transfer)
    return transfer


def test_areas_are_made_when_they_are_needed_and_kept() -> None:
    areas, made = _pool(3)
    assert len(made.areas) == 1, "the first is touched before training goes on"
    for step in range(5):
        transfer = _send(areas, step)
        transfer.released.set()
        transfer.set_state(TransferState.STAGED)
    assert len(made.areas) == 1, "one is enough as long as it is released in time"
    first, _, third = _send(areas, 5), _send(areas, 6), _send(areas, 7)
    assert len(made.areas) == 3
    assert areas.nbytes == 30
    assert areas.acquire() is None
    assert [transfer.step for transfer in areas.being_read()] == [5, 6, 7]
    for transfer in (first, third):
        transfer.released.set()
        transfer.set_state(TransferState.STAGED)
    _send(areas, 8)
    _send(areas, 9)
    assert areas.acquire() is None
    assert len(made.areas) == 3


def test_no_memory_for_another_area_costs_no_training(caplog: pytest.LogCaptureFixture) -> None:
    """The first one must be there; without a second one steps are declined, or waited for, as with one."""
    areas, made = Areas(), Made()

    def make(_slot: object) -> Staging:
        if made.areas:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return made()

    areas.reset(make, 4)
    before = _send(areas, 1)
    assert areas.acquire() is None
    assert areas.acquire() is None
    assert areas.count_max == 1
    assert caplog.text.count("no memory for one more staging area, 1 are in use") == 1
    before.released.set()
    assert areas.acquire() is not None


def test_in_flight_is_what_the_ring_does_not_have_yet() -> None:
    areas, _ = _pool(2)
    first, second = _send(areas, 1), _send(areas, 2)
    first.released.set()
    assert [transfer.step for transfer in areas.in_flight()] == [1, 2], "sent, but other ranks are not"
    first.set_state(TransferState.STAGED)
    assert [transfer.step for transfer in areas.in_flight()] == [2]
    second.set_state(TransferState.DECLINED)
    assert [transfer.step for transfer in areas.in_flight()] == [2], "given up, but MPI still reads it"
    second.released.set()
    assert areas.in_flight() == []


def test_steps_sent_and_not_staged_are_bounded() -> None:
    """Areas are free as soon as MPI has read them; without this a slow store would have many steps share the ring."""
    areas, _ = _pool(2)
    transfers = [_send(areas, step) for step in (1, 2)]
    transfers[0].released.set()
    transfers.append(_send(areas, 3))
    for transfer in transfers:
        transfer.released.set()
    assert areas.acquire() is None
    assert not areas.being_read()
    transfers[0].set_state(TransferState.STAGED)
    assert areas.acquire() is not None


def test_a_new_layout_gives_the_memory_back_first() -> None:
    areas, made = _pool(2)
    transfers = [_send(areas, step) for step in (1, 2)]
    with pytest.raises(AssertionError):
        areas.reset(made, 2)
    for transfer in transfers:
        transfer.released.set()

    def make(_slot: object) -> Staging:
        gc.collect()
        assert not any(area() for area in made.areas), "old and new areas at the same time"
        return cast(Staging, FakeStaging())

    areas.reset(make, 2)
    assert areas.nbytes == 10
    assert [transfer.step for transfer in areas.in_flight()] == [1, 2], "they may still have to be staged"


def test_the_limit_of_memory_is_kept_and_the_same_on_every_rank() -> None:
    layout = laid_out([99_000] * 3, ranks=2, chunk_bytes=4096)
    largest = max(area_bytes(layout, rank) for rank in range(2))
    smallest = min(area_bytes(layout, rank) for rank in range(2))
    assert smallest < largest
    assert areas_max(layout, in_flight_max=4, host_bytes_max=None) == 4
    assert areas_max(layout, in_flight_max=4, host_bytes_max=3 * largest - 1) == 2
    assert areas_max(layout, in_flight_max=2, host_bytes_max=3 * largest) == 2
    assert areas_max(layout, in_flight_max=8, host_bytes_max=largest) == 1


def test_a_limit_below_one_slice_is_refused_by_name_with_what_to_do() -> None:
    layout = laid_out([100_000] * 3, ranks=2, chunk_bytes=4096)
    largest = max(range(2), key=lambda rank: area_bytes(layout, rank))
    with pytest.raises(ConfigError) as caught:
        areas_max(layout, in_flight_max=1, host_bytes_max=area_bytes(layout, largest) - 1)
    assert str(caught.value) == (
        f"trainer setting host_bytes_max: expected at least {area_bytes(layout, largest)} bytes, which one staging "
        f"area takes for the slice of rank {largest} of an image of {layout.image_bytes} bytes, got "
        f"{area_bytes(layout, largest) - 1}; raise it, or train on more than 2 ranks, so that each slice is smaller"
    )
