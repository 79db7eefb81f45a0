"""The room for a mirror is the memory that is free at the training's peak."""

from __future__ import annotations

import pytest

from trainer_side.save.device_copy import MirrorRoom
from trainer_side.save.device_stream import DeviceMemory

TOTAL = 100


def _memory(
    *, reserved: int, peak: int, retries: int = 0, others: int = 0, returned: int = 0
) -> DeviceMemory:
    return DeviceMemory(TOTAL - reserved - others, TOTAL, reserved, peak, retries, returned)


def _after_one_save(memory: DeviceMemory) -> MirrorRoom:
    room = MirrorRoom(None)
    assert not room.has_room(1, memory), "what a step of training takes is not known yet"
    return room


def test_a_mirror_has_room_where_training_leaves_it() -> None:
    memory = _memory(reserved=30, peak=50)
    assert _after_one_save(memory).has_room(40, memory)
    assert not _after_one_save(memory).has_room(41, memory), "a tenth of the device is left alone"


def test_memory_that_training_takes_again_is_left_to_it() -> None:
    before, trained = _memory(reserved=30, peak=30), _memory(reserved=30, peak=80)
    assert not _after_one_save(before).has_room(30, trained)


def test_memory_of_others_is_not_there() -> None:
    memory = _memory(reserved=30, peak=50, others=20)
    assert _after_one_save(memory).has_room(20, memory)
    assert not _after_one_save(memory).has_room(21, memory)


def test_memory_that_torch_keeps_for_training_is_no_room() -> None:
    memory = _memory(reserved=80, peak=80)
    assert _after_one_save(memory).has_room(10, memory)
    assert not _after_one_save(memory).has_room(11, memory)


def test_a_peak_that_was_reset_is_remembered() -> None:
    room = _after_one_save(_memory(reserved=30, peak=80))
    assert not room.has_room(30, _memory(reserved=30, peak=30))


def test_where_torch_had_to_give_memory_back_during_a_copy_no_mirror_is_made_any_more() -> None:
    memory = _memory(reserved=30, peak=50)
    room = _after_one_save(memory)
    assert room.has_room(30, memory)
    room.record_lent(30)
    room.on_copy_end(_memory(reserved=30, peak=50, retries=1))
    for _ in range(2):
        assert not room.has_room(30, _memory(reserved=30, peak=50, retries=1))


def test_memory_that_torch_gives_back_between_two_copies_is_no_reason_to_make_none() -> None:
    memory = _memory(reserved=30, peak=30)
    room = _after_one_save(memory)
    assert room.has_room(20, memory)
    room.record_lent(20)
    room.on_copy_end(memory)
    assert room.has_room(20, _memory(reserved=30, peak=70, retries=1, returned=20))


def test_memory_kept_for_copies_is_not_taken_for_trainings() -> None:
    """Training holds 30 throughout; the mirror of 50 stays with torch, and is found there again."""
    room = _after_one_save(_memory(reserved=30, peak=30))
    assert room.has_room(50, _memory(reserved=30, peak=30))
    room.record_lent(50)
    for _ in range(3):
        assert room.has_room(50, _memory(reserved=80, peak=80))
        room.record_lent(50)
    assert not room.has_room(50, _memory(reserved=91, peak=91)), "training has grown by 11"


def test_a_peak_without_the_memory_of_copies_counts_in_full() -> None:
    """Torch has given that back, and training has grown into it."""
    room = _after_one_save(_memory(reserved=30, peak=30))
    assert room.has_room(50, _memory(reserved=30, peak=30))
    room.record_lent(50)
    grown = _memory(reserved=45, peak=85, retries=1, returned=50)
    assert not room.has_room(50, grown)
    assert not room.has_room(6, grown)
    assert room.has_room(5, grown)


def test_a_limit_is_no_reason_to_ask_torch_for_what_the_device_has_not() -> None:
    """It would give back all that it keeps for training before it says no."""
    room = MirrorRoom(30)
    assert room.has_room(30, _memory(reserved=70, peak=70))
    room.record_lent(30)
    assert room.has_room(30, _memory(reserved=100, peak=100)), "it is kept"
    room.record_lent(30)
    assert not room.has_room(30, _memory(reserved=100, peak=100, returned=30))


@pytest.mark.parametrize("limit", [None, 0])
def test_a_copy_without_a_mirror_has_to_fit_into_the_same_room(limit: int | None) -> None:
    memory = _memory(reserved=30, peak=50)
    room = MirrorRoom(limit)
    room.has_room(100, memory)
    assert not room.try_reserve(1), "what a step of training takes is not known yet"
    assert not room.has_room(100, memory)
    assert not room.try_reserve(41)
    assert room.has_room_in_part(15) is (limit is None)
    assert room.try_reserve(25)
    assert room.try_reserve(15) is (limit is not None), "what is taken is not there a second time"
    room.on_copy_end(_memory(reserved=30, peak=50, retries=1))
    room.has_room(100, _memory(reserved=30, peak=50, retries=1))
    assert not room.try_reserve(1), "torch had to give memory back while there was less of it"


def test_retries_of_before_are_not_a_mirrors() -> None:
    memory = _memory(reserved=30, peak=50, retries=5)
    assert _after_one_save(memory).has_room(30, memory)


def test_a_refused_allocation_is_the_last_one() -> None:
    memory = _memory(reserved=30, peak=50)
    room = _after_one_save(memory)
    room.record_out_of_memory()
    assert not room.has_room(1, memory)


def test_a_limit_holds_from_the_first_save_on_and_what_cannot_be_measured_has_no_room() -> None:
    assert MirrorRoom(30).has_room(30, None)
    assert not MirrorRoom(30).has_room(31, None)
    assert not MirrorRoom(None).has_room(1, None)


def test_the_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "holdfast.trainer")
    memory = _memory(reserved=30, peak=50)
    room = _after_one_save(memory)
    for _ in range(3):
        room.has_room(30, memory)
    assert len(caplog.messages) == 1
    assert "copied on the device first" in caplog.text
    room.has_room(90, memory)
    assert "only 40 are spare" in caplog.text
