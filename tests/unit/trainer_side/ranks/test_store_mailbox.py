"""Messages among ranks by a real TCPStore: order, bytes, concurrent senders, idle polls, a dying store."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from holdfast.errors import PeerLost
from trainer_side.ranks.c10d_store import StoreMailbox

# A store in a process of its own, which prints its port and lives until its input ends.
SERVER = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)


def mailboxes(server: TCPStore, ranks: int, clock: Clock | None = None) -> list[StoreMailbox]:
    return [
        StoreMailbox(
            PrefixStore("mail", connect(server.port)),
            "here",
            rank=rank,
            ranks=ranks,
            clock=clock or Clock(),
        )
        for rank in range(ranks)
    ]


def test_messages_come_once_in_order_and_to_the_byte(server: TCPStore) -> None:
    first, second, third = mailboxes(server, 3)
    every_byte = bytes(range(256)) * 300
    for message in (b"", b"\n", every_byte):
        first.send(1, message)
    third.send(1, b"from another rank")
    for sender in (first, third):
        sender.flush(5.0)
    found = second.poll()
    assert [message for rank, message in found if rank == 0] == [b"", b"\n", every_byte]
    assert [message for rank, message in found if rank == 2] == [b"from another rank"]
    assert second.poll() == first.poll() == []
    first.send(0, b"to itself")
    first.flush(5.0)
    assert first.poll() == [(0, b"to itself")]
    assert first.lost_ranks() == frozenset()


def test_messages_of_many_senders_are_not_lost_while_one_takes(server: TCPStore) -> None:
    ranks, each = 4, 200
    boxes = mailboxes(server, ranks)
    threads = [
        threading.Thread(target=lambda box=box: [box.send(0, f"{number}".encode()) for number in range(each)])
        for box in boxes[1:]
    ]
    for thread in threads:
        thread.start()
    found: list[tuple[int, bytes]] = []
    boxes[0]._clock = iter(range(10**9)).__next__  # each look is a second after the one before
    while any(thread.is_alive() for thread in threads):
        found += boxes[0].poll()
    for box in boxes[1:]:
        box.flush(5.0)
    found += boxes[0].poll()
    for thread in threads:
        thread.join()
    assert Counter(rank for rank, _ in found) == dict.fromkeys(range(1, ranks), each)
    for sender in range(1, ranks):
        assert [int(message) for rank, message in found if rank == sender] == list(range(each))


def test_an_idle_mailbox_looks_less_and_less_often_until_something_comes(server: TCPStore) -> None:
    clock = Clock()
    looks = 0

    class Counting(PrefixStore):
        def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
            nonlocal looks
            looks += 1
            return super().compare_set(key, expected_value, desired_value)

    box = StoreMailbox(Counting("mail", connect(server.port)), "here", rank=0, ranks=2, clock=clock)
    other = mailboxes(server, 2)[1]

    def looks_in_a_second() -> int:
        before = looks
        for _ in range(1000):
            clock.now += 1e-3
            assert box.poll() == []
        return looks - before

    assert 20 <= looks_in_a_second() < 40
    assert 4 <= looks_in_a_second() <= 6
    other.send(0, b"news")
    other.flush(5.0)
    clock.now += 0.2
    assert box.poll() == [(1, b"news")]
    assert looks_in_a_second() >= 20
    looks_in_a_second()
    box.send(1, b"a question")
    assert looks_in_a_second() >= 20, "an answer may come soon"


def test_a_store_that_dies_is_a_lost_peer_by_name() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        box = StoreMailbox(connect(int(process.stdout.readline())), "node-0:29400", rank=1, ranks=2)
        box.send(0, b"hello")
        box.flush(1.0)
        process.kill()
        process.wait()
        with pytest.raises(
            PeerLost, match="the store of this job at node-0:29400 is lost, rank 1 looking for"
        ):
            box.poll()
        with pytest.raises(PeerLost, match="rank 1 sending its last messages"):
            box.flush(1.0)
