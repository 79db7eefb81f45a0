"""The pure core of slots: the next one, the kept ones, the freed ones; and all of that in any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainer_side.tiers.file_slots import FileSlots, SlotEntry
from trainer_side.tiers.tier import Order


def _save(slots: FileSlots, order: Order, *, complete: bool = True) -> int:
    number = slots.begin(order)
    assert number is not None
    slots.mark_sealed(number)
    if complete:
        assert slots.complete(order)
    return number


def test_two_slots_take_turns() -> None:
    slots = FileSlots(2)
    assert [_save(slots, (1, step)) for step in range(1, 7)] == [0, 1, 0, 1, 0, 1]


def test_slots_are_one_more_than_steps_in_flight() -> None:
    slots = FileSlots(3)
    _save(slots, (1, 1))
    assert slots.begin((1, 2)) == 1
    assert slots.begin((1, 3)) == 2
    assert slots.begin((1, 4)) is None


def test_the_later_one_wins_and_the_earlier_gives_its_slot_back() -> None:
    slots = FileSlots(3)
    slow = slots.begin((1, 1))
    assert slow is not None
    _save(slots, (1, 2))
    assert not slots.is_wanted(slow)
    slots.release(slow)
    assert slots.begin((1, 3)) == slow


def test_a_later_one_that_is_not_complete_takes_nothing_away() -> None:
    slots = FileSlots(3)
    slow = slots.begin((1, 1))
    assert slow is not None
    _save(slots, (1, 2), complete=False)
    assert slots.is_wanted(slow)
    slots.mark_sealed(slow)
    assert slots.table() == [SlotEntry((1, 1)), SlotEntry((1, 2)), None]


def test_an_older_step_is_not_begun() -> None:
    slots = FileSlots(2)
    _save(slots, (2, 5))
    assert slots.begin((2, 5)) is None
    assert slots.begin((1, 9)) is None
    assert slots.begin((2, 6)) is not None


def test_the_same_step_is_not_begun_twice_but_again() -> None:
    slots = FileSlots(3)
    number = slots.begin((1, 1))
    assert number is not None
    assert slots.begin((1, 1)) is None
    slots.release(number)
    assert slots.begin((1, 1)) == number


def test_a_void_step_goes_first_and_is_not_listed() -> None:
    slots = FileSlots(3)
    _save(slots, (1, 1))
    _save(slots, (1, 2), complete=False)
    _save(slots, (1, 3), complete=False)
    slots.void((1, 3))
    assert slots.table() == [SlotEntry((1, 1), complete=True), SlotEntry((1, 2)), None]
    assert slots.begin((1, 4)) == 2


def test_a_void_step_that_is_being_written_is_not_wanted() -> None:
    slots = FileSlots(2)
    number = slots.begin((1, 1))
    assert number is not None
    slots.void((1, 1))
    assert not slots.is_wanted(number)


def test_a_complete_step_of_this_life_is_never_void() -> None:
    slots = FileSlots(2)
    _save(slots, (1, 1))
    slots.void((1, 1))
    assert slots.table() == [SlotEntry((1, 1), complete=True), None]


def test_the_newest_complete_step_that_was_found_stays() -> None:
    slots = FileSlots(3, {0: SlotEntry((1, 7)), 1: SlotEntry((1, 5), complete=True), 2: SlotEntry((1, 6))})
    assert slots.begin((2, 6)) == 2
    assert slots.begin((2, 7)) == 0
    assert slots.begin((2, 8)) is None


def test_where_none_is_known_to_be_complete_the_newest_stays() -> None:
    slots = FileSlots(2, {0: SlotEntry((1, 7)), 1: SlotEntry((1, 6))})
    assert slots.begin((2, 1)) == 1
    assert slots.begin((2, 2)) is None


def test_after_a_restore_what_is_told_counts() -> None:
    slots = FileSlots(2, {0: SlotEntry((1, 7), complete=True), 1: SlotEntry((1, 6))})
    slots.void((1, 7))
    assert slots.complete((1, 6))
    assert slots.begin((2, 7)) == 0
    assert slots.begin((2, 8)) is None


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_are_none(count: int) -> None:
    with pytest.raises(AssertionError):
        FileSlots(count)


class _Life(RuleBasedStateMachine):
    """Any order of events, with what must hold kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.attempt, self.step = 3, 1, 0
        self.slots = FileSlots(self.count)
        self.writing: dict[int, Order] = {}
        self.sealed: set[Order] = set()  # in this life, and neither void nor older than a complete one
        self.newest: Order = (0, 0)  # complete, and sealed here

    @rule(gap=st.integers(1, 3))
    def begin(self, gap: int) -> None:
        self.step += gap
        before = self.slots.table()
        number = self.slots.begin((self.attempt, self.step))
        if number is None:
            assert len(self.writing) + sum(entry is not None for entry in before) >= self.count
            return
        assert number not in self.writing
        taken = before[number]
        assert taken is None or (taken.order not in self.sealed and taken.order != self.newest)
        self.writing[number] = (self.attempt, self.step)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        order = self.writing.pop(number)
        if self.slots.is_wanted(number):
            assert order > self.newest
            self.slots.mark_sealed(number)
            self.sealed.add(order)
        else:
            self.slots.release(number)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        del self.writing[number]
        self.slots.release(number)

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(sorted(self.sealed)))
        assert self.slots.complete(order)
        assert not self.slots.complete(order)
        self.newest = max(self.newest, order)
        self.sealed = {one for one in self.sealed if one > self.newest}

    @rule(data=st.data())
    def void(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(sorted({*self.sealed, *self.writing.values(), (self.attempt, 0)})))
        self.slots.void(order)
        self.sealed.discard(order)

    @rule()
    def killed(self) -> None:
        """The next life finds what was sealed; nobody tells it anything."""
        found = {number: entry for number, entry in enumerate(self.slots.table()) if entry is not None}
        self.slots = FileSlots(self.count, found)
        self.attempt, self.step = self.attempt + 1, 0
        self.writing, self.sealed = {}, set()
        if len(found) == self.count:
            assert FileSlots(self.count, found).begin((self.attempt, 1)) is not None, (
                "no slot will ever be free"
            )

    @invariant()
    def what_must_stay_is_there(self) -> None:
        held = {entry.order for entry in self.slots.table() if entry is not None}
        assert self.sealed <= held
        assert self.newest == (0, 0) or self.newest in held
        assert len(held) <= self.count


TestAnyOrderOfEvents = _Life.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_slot_whose_memory_is_missing_is_nobodys_until_it_is_made() -> None:
    slots = FileSlots(2, missing=[1])
    assert slots.begin((1, 1)) == 0
    slots.mark_sealed(0)
    assert slots.begin((1, 2)) is None
    slots.void((1, 2))
    assert [entry and entry.order for entry in slots.table()] == [(1, 1), None]
    slots.mark_made(1)
    assert slots.begin((1, 2)) == 1
