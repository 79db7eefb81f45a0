from __future__ import annotations

import random

from holdfast.net.payload_frame import PayloadHeader, TakenNumbers


def test_a_header_is_read_as_it_was_written() -> None:
    header = PayloadHeader(2**40, 17, 3 * 2**30)
    assert PayloadHeader.from_bytes(header.to_bytes()) == header


def test_each_number_is_taken_once_in_whatever_order_they_come() -> None:
    taken, numbers = TakenNumbers(), list(range(1, 500))
    random.Random(1).shuffle(numbers)
    for place, number in enumerate(numbers):
        assert number not in taken
        taken.add(number)
        assert all(other in taken for other in numbers[: place + 1 : 50])
    assert 500 not in taken
