from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from holdfast.errors import ProtocolError
from holdfast.net.message_line import MessageLine
from holdfast.wire.frames import MAX_MESSAGE_BYTES


def _move(
    sender: MessageLine, receiver: MessageLine, nbytes_max: int, part_bytes: int = 1 << 30
) -> list[bytes]:
    """Carry at most `nbytes_max` bytes from one line to the other, in parts; what arrived whole."""
    messages: list[bytes] = []
    while nbytes_max > 0 and (data := sender.next_outgoing()) is not None:
        room = receiver.receive_buffer()
        size = min(len(data), nbytes_max, part_bytes, len(room))
        room[:size] = data[:size]
        sender.mark_written(size)
        messages += receiver.data_received(size)
        nbytes_max -= size
    return messages


def _random_messages(rng: random.Random, count: int) -> list[bytes]:
    return [rng.randbytes(rng.choice((0, 1, 30, 500, 70_000, 200_000))) for _ in range(count)]


@pytest.mark.parametrize("part_bytes", [1, 7, 100_000])
def test_messages_arrive_whole_and_in_order(part_bytes: int) -> None:
    there, here = MessageLine(), MessageLine()
    messages = [b"", b"a", b"b" * 70_000, b"c" * 3000]
    for message in messages:
        there.put(message)
    assert _move(there, here, 1 << 30, part_bytes) == messages
    assert there.unacknowledged == len(messages)
    assert _move(here, there, 1 << 30) == []  # that they have been received
    assert there.unacknowledged == 0
    assert there.next_outgoing() is None
    assert here.next_outgoing() is None  # and no word about the word


@pytest.mark.parametrize("seed", range(30))
def test_no_message_is_lost_or_doubled_however_often_the_connection_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    ends = (MessageLine(), MessageLine())
    sent = (_random_messages(rng, 30), _random_messages(rng, 30))
    arrived: tuple[list[bytes], list[bytes]] = ([], [])
    waiting = (list(sent[0]), list(sent[1]))
    for _ in range(2000):
        for end, queue in zip(ends, waiting, strict=True):
            if queue and rng.random() < 0.3:
                end.put(queue.pop(0))
        side = rng.randrange(2)
        arrived[1 - side].extend(_move(ends[side], ends[1 - side], rng.choice((1, 20, 5000, 300_000))))
        if rng.random() < 0.05:
            counts = (ends[0].received, ends[1].received)
            ends[0].resume(counts[1])
            ends[1].resume(counts[0])
    while any(waiting) or any(end.unacknowledged for end in ends):
        for side in (0, 1):
            for message in waiting[side]:
                ends[side].put(message)
            waiting[side].clear()
            arrived[1 - side].extend(_move(ends[side], ends[1 - side], 1 << 30))
    assert arrived[1] == sent[0]
    assert arrived[0] == sent[1]


def _hear(line: MessageLine, data: bytes) -> list[bytes]:
    room = line.receive_buffer()
    room[: len(data)] = data
    return line.data_received(len(data))


@pytest.mark.parametrize(
    "record",
    [
        (3, 0, 0),  # no such kind
        (2, 5, 0),  # an acknowledgement with a body
        (1, MAX_MESSAGE_BYTES + 1, 0),
        (1, 0xFFFF_FFFF, 0),
        (2, 0, 1),  # of a message that was never sent
    ],
)
def test_a_senseless_record_ends_the_connection(record: tuple[int, int, int]) -> None:
    with pytest.raises(ProtocolError):
        _hear(MessageLine(), struct.pack("<IIQ", *record))


def test_a_count_that_goes_back_is_refused() -> None:
    line = MessageLine()
    for _ in range(3):
        line.put(b"x")
    while (data := line.next_outgoing()) is not None:
        line.mark_written(len(data))
    _hear(line, struct.pack("<IIQ", 2, 0, 2))
    with pytest.raises(ProtocolError, match="expected 2 to 3"):
        _hear(line, struct.pack("<IIQ", 2, 0, 1))
    for received in (1, 4):
        with pytest.raises(ProtocolError, match="expected 2 to 3"):
            line.resume(received)


def test_a_long_message_that_does_not_come_costs_no_memory() -> None:
    lines = [MessageLine() for _ in range(8)]
    begun = _resident_bytes()
    for line in lines:
        _hear(line, struct.pack("<IIQ", 1, MAX_MESSAGE_BYTES, 0) + b"x" * 100)
    grown = _resident_bytes() - begun
    assert grown < MAX_MESSAGE_BYTES  # of eight times as much that was announced


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
