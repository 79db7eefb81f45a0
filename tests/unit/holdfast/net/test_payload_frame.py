from __future__ import annotations

import random

import pytest

from holdfast.errors import ProtocolError
from holdfast.net.payload_frame import NUMBERS_AHEAD_MAX, PayloadHeader, ReceivedNumbers


def test_a_header_is_read_as_it_was_written() -> None:
    header = PayloadHeader(2**40, 17, 3 * 2**30)
    assert PayloadHeader.from_bytes(header.to_bytes()) == header


def test_each_number_is_taken_once_in_whatever_order_they_come() -> None:
    taken, numbers = ReceivedNumbers(), list(range(1, 500))
    random.Random(1).shuffle(numbers)
    for place, number in enumerate(numbers):
        assert number not in taken
        taken.add(number)
        assert all(other in taken for other in numbers[: place + 1 : 50])
    assert 500 not in taken


def test_gaps_cost_a_bounded_room_and_no_number_is_far_ahead_of_one() -> None:
    taken = ReceivedNumbers()
    for number in range(2, NUMBERS_AHEAD_MAX + 2, 2):
        taken.add(number)
    assert taken._beyond.bit_length() <= NUMBERS_AHEAD_MAX + 1
    with pytest.raises(ProtocolError, match="payload 1 has not come"):
        taken.add(NUMBERS_AHEAD_MAX + 2)
    assert 3 not in taken
    taken.add(1)
    assert 3 not in taken
    taken.add(NUMBERS_AHEAD_MAX + 2)
    with pytest.raises(ProtocolError, match="payload 3 has not come"):
        taken.add(NUMBERS_AHEAD_MAX + 4)


def test_numbers_in_order_leave_nothing_behind() -> None:
    taken = ReceivedNumbers()
    for number in range(1, 200_000):
        taken.add(number)
    assert taken._beyond == 0
    assert 1 in taken
    assert 199_999 in taken
    assert 200_000 not in taken
