"""Bounds on the memory that a rank over TCP can make a stager use: a rank that exceeds one is lost, and named.

A simulated rank on plain sockets has the key and obeys no other rule.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, ProtocolError
from holdfast.image.entries import Extent
from holdfast.net.handshake import (
    ADMISSION_BYTES,
    CHALLENGE_BYTES,
    RANKS_MAX,
    Hello,
    JobStart,
    answer_challenge,
)
from holdfast.net.message_line import UNACKNOWLEDGED_BYTES_MAX
from holdfast.net.payload_frame import NUMBERS_AHEAD_MAX, RECEIPT, PayloadHeader
from holdfast.ring.remains import ANSWER_BYTES_MAX, FetchKind
from holdfast.ring.ring import Ring
from holdfast.wire.frames import Frame, Kind, to_json
from stager import payload_line
from stager.fetches import Fetches
from stager.trainers import Trainers
from tests.support.turned_stager import KEY, TurnedStager
from trainer_side.ranks.tcp_stager_port import StagerTarget, connect_to_stager

_NBYTES = 400_000  # of a payload: more than one system call writes


@pytest.fixture
def stager() -> Iterator[TurnedStager]:
    with contextlib.closing(TurnedStager()) as stager:
        yield stager


@pytest.fixture
def sockets() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _admitted(
    stager: TurnedStager, sockets: contextlib.ExitStack, *, channel: int = 0, ranks: int = 1
) -> socket.socket:
    """A connection of rank 0 that the stager has admitted; the first one begins its job."""
    sock = sockets.enter_context(socket.create_connection(("127.0.0.1", stager.port_number)))
    hello = Hello(0, ranks, channel, "launch", b"1" * 16, os.urandom(32), channel != 0).to_bytes()
    sock.sendall(hello)
    challenged = _said(stager, sock, CHALLENGE_BYTES)
    proof = answer_challenge(KEY, hello, challenged, 0)
    assert proof is not None
    sock.sendall(proof)
    if stager.port is None:
        stager.open_next(60.0)
    assert _said(stager, sock, ADMISSION_BYTES) == bytes(ADMISSION_BYTES)
    return sock


def _said(stager: TurnedStager, sock: socket.socket, nbytes: int) -> bytes:
    heard = bytearray()
    sock.setblocking(False)

    def hear() -> bool:
        with contextlib.suppress(BlockingIOError):
            heard.extend(sock.recv(nbytes - len(heard)))
        return len(heard) == nbytes

    stager.until(hear, f"{nbytes} bytes from the stager")
    sock.setblocking(True)
    return bytes(heard)


def _say(stager: TurnedStager, sock: socket.socket, data: bytes | memoryview) -> None:
    """Send all of `data` while the stager receives."""
    left = memoryview(data)
    sock.setblocking(False)

    def send() -> bool:
        nonlocal left
        with contextlib.suppress(BlockingIOError):
            left = left[sock.send(left) :]
        return not left

    stager.until(send, "the stager to take what is sent")
    sock.setblocking(True)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_a_job_of_very_many_ranks_costs_memory_as_they_come(
    stager: TurnedStager, sockets: contextlib.ExitStack
) -> None:
    before = _resident_bytes()
    _admitted(stager, sockets, ranks=RANKS_MAX)
    port = stager.port
    assert port is not None
    now = [0.0]
    trainers = Trainers(port, rank_seconds_max=20.0, clock=lambda: now[0])
    for _ in range(100):  # beats of 500 s
        now[0] += 5.0
        trainers.send_beats(1)
        stager.turn()
    assert port.ranks == RANKS_MAX
    assert _resident_bytes() - before < 64 << 20  # 64 KiB each would be 4 GiB


def test_more_ranks_than_a_stager_serves_are_refused_on_both_sides(
    stager: TurnedStager, sockets: contextlib.ExitStack
) -> None:
    before = _resident_bytes()
    with pytest.raises(
        ConfigError, match=f"has {1 << 20} ranks, and a stager that listens serves at most {RANKS_MAX}"
    ):
        connect_to_stager(
            TrainerConfig(connections=1, reconnect_seconds_max=1.0),
            StagerTarget(f"127.0.0.1:{stager.port_number}", KEY),
            rank=0,
            ranks=1 << 20,
            start=JobStart("launch", b"1" * 16),
            seconds_max=1.0,
        )
    stranger = sockets.enter_context(socket.create_connection(("127.0.0.1", stager.port_number)))
    stranger.sendall(Hello(0, 1 << 20, 0, "launch", b"1" * 16, b"n" * 32).to_bytes())
    stranger.setblocking(False)
    stager.until(lambda: _is_over(stranger), "the stranger to be hung up on")
    assert stager.listener.next_job() is None
    assert _resident_bytes() - before < 16 << 20


def _is_over(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_rank_that_does_not_come_is_lost_whoever_came(
    stager: TurnedStager, sockets: contextlib.ExitStack
) -> None:
    _admitted(stager, sockets, ranks=3)
    port = stager.port
    assert port is not None
    port.send(2, b"for one that has not come")
    port._start_deadline = time.monotonic()
    stager.until(lambda: len(stager.lost) >= 2, "two ranks to be lost")
    stager.turn()
    assert [rank for rank, _ in stager.lost] == [1, 2]
    assert all("did not come within 60 s after the first rank" in reason for _, reason in stager.lost)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_unacknowledged_messages_are_bounded_and_their_rank_is_lost_by_name(
    stager: TurnedStager, sockets: contextlib.ExitStack
) -> None:
    _admitted(stager, sockets)
    port = stager.port
    assert port is not None
    before, sent = _resident_bytes(), 0
    while not stager.lost:
        assert sent < 512
        port.send(0, bytes([sent % 256]) * (1 << 20))
        sent += 1
        stager.turn()
    assert sent == UNACKNOWLEDGED_BYTES_MAX // ((1 << 20) + 128) + 1
    assert [rank for rank, _ in stager.lost] == [0]
    assert f"rank 0 has not acknowledged {sent - 1} control messages" in stager.lost[0][1]
    assert _resident_bytes() - before < 32 << 20, "what was kept for it is given back"
    port.send(0, b"more")
    assert port.unsent_to(0) == 0


def test_small_messages_count_with_what_each_costs(
    stager: TurnedStager, sockets: contextlib.ExitStack
) -> None:
    _admitted(stager, sockets)
    port = stager.port
    assert port is not None
    before = _resident_bytes()
    for number in range(UNACKNOWLEDGED_BYTES_MAX // 128):
        port.send(0, number.to_bytes(8, "little"))
    stager.turn()
    assert "has not acknowledged" in stager.lost[0][1]
    assert _resident_bytes() - before < 2 * UNACKNOWLEDGED_BYTES_MAX


def test_questions_about_the_ring_that_nobody_hears_answered_keep_two_answers(
    stager: TurnedStager, sockets: contextlib.ExitStack, tmp_path: Path
) -> None:
    _admitted(stager, sockets)
    port = stager.port
    assert port is not None
    chunk_bytes = 2 * ANSWER_BYTES_MAX
    with Ring.create(tmp_path / "run", chunk_bytes=chunk_bytes, ring_chunks=1, attempt=1) as ring:
        ring.mark_filling(0, 1, 7, 0)
        ring.slot_memory(0)[:] = os.urandom(1024) * (chunk_bytes // 1024)
        ring.mark_full(0, [(0, 1)], chunk_bytes)
        line: Any = SimpleNamespace(flusher=SimpleNamespace(ring=ring, attempt=1))
        fetches = Fetches(port, line)
        fetches.handle(0, Frame(Kind.FETCH, 1, flags=FetchKind.HELD))
        assert fetches.answer()
        before = _resident_bytes()
        question = to_json({"offset": 5, "nbytes": ANSWER_BYTES_MAX})
        asked = Frame(Kind.FETCH, 1, 7, 0, FetchKind.BYTES, 1, question)
        for _ in range(1024 + 1):
            fetches.handle(0, asked)
            fetches.answer()
            stager.turn()
        with pytest.raises(ProtocolError, match="FETCH from rank 0: 1024 requests"):
            fetches.handle(0, asked)
        assert port.unsent_to(0) == 2
        assert _resident_bytes() - before < 6 * ANSWER_BYTES_MAX
        with pytest.raises(ProtocolError, match=f"expected at most {ANSWER_BYTES_MAX}"):
            fetches.handle(
                0,
                Frame(Kind.FETCH, 1, 7, 0, FetchKind.BYTES, 1, to_json({"offset": 0, "nbytes": chunk_bytes})),
            )


# -- payloads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [NUMBERS_AHEAD_MAX + 2, 2**63])
def test_a_payload_far_ahead_of_one_that_has_not_come_is_refused(
    stager: TurnedStager, sockets: contextlib.ExitStack, number: int
) -> None:
    _admitted(stager, sockets)
    payloads = _admitted(stager, sockets, channel=1)
    _say(stager, payloads, PayloadHeader(number, 0, 1).to_bytes() + b"x")
    stager.until(lambda: bool(stager.lost), "the rank to be lost")
    assert stager.lost[0][1].startswith(
        f"rank 0 broke the protocol: payload {number}, and payload 1 has not come"
    )


def test_an_impossible_payload_loses_its_rank(stager: TurnedStager, sockets: contextlib.ExitStack) -> None:
    _admitted(stager, sockets)
    payloads = _admitted(stager, sockets, channel=1)
    _say(stager, payloads, PayloadHeader(1, 0, 1 << 40).to_bytes())
    stager.until(lambda: bool(stager.lost), "the rank to be lost")
    assert f"rank 0 broke the protocol: a payload of {1 << 40} bytes" in stager.lost[0][1]


def test_a_connection_for_payloads_that_ends_loses_nobody(
    stager: TurnedStager, sockets: contextlib.ExitStack
) -> None:
    _admitted(stager, sockets)
    payloads = _admitted(stager, sockets, channel=1)
    _say(stager, payloads, PayloadHeader(1, 0, 100).to_bytes() + b"half")
    payloads.close()
    again = _admitted(stager, sockets, channel=1)
    _say(stager, again, PayloadHeader(1, 0, 4).to_bytes() + b"all.")
    assert RECEIPT.unpack(_said(stager, again, RECEIPT.size)) == (1,)
    assert stager.lost == []


def test_receipts_that_nobody_reads_are_bounded(
    stager: TurnedStager, sockets: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_line, "_RECEIPTS_BYTES_MAX", 4096)
    _admitted(stager, sockets)
    payloads = _admitted(stager, sockets, channel=1)
    payloads.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    many = (PayloadHeader(1, 0, 1).to_bytes() + b"x") * 4000
    payloads.setblocking(False)
    sent = 0

    def say() -> bool:
        nonlocal sent
        with contextlib.suppress(OSError):
            sent += payloads.send(many[sent % len(many) :])
        return bool(stager.lost)

    stager.until(say, "the rank to be lost")
    assert "rank 0 broke the protocol: does not read its receipts" in stager.lost[0][1]


@pytest.mark.parametrize("second", [1, 2], ids=["the same number", "another number"])
@pytest.mark.parametrize("first_ends", [True, False])
def test_half_a_payload_is_not_written_on_into_what_its_slot_holds_by_then(
    stager: TurnedStager, sockets: contextlib.ExitStack, second: int, first_ends: bool
) -> None:
    _admitted(stager, sockets)
    lines = [_admitted(stager, sockets, channel=channel) for channel in (1, 2)]
    port, slot = stager.port, bytearray(_NBYTES)
    assert port is not None
    pieces = (Extent(0, _NBYTES),)
    port.post(0, 5, memoryview(slot), pieces)
    half = _NBYTES // 2
    _say(stager, lines[0], PayloadHeader(1, 5, _NBYTES).to_bytes() + b"\x01" * half)
    stager.until(lambda: slot.count(1) == half, "half of it")
    _say(stager, lines[1], PayloadHeader(second, 5, _NBYTES).to_bytes() + b"\x02" * _NBYTES)
    assert RECEIPT.unpack(_said(stager, lines[1], RECEIPT.size)) == (second,)
    assert port.pop_received(0, 5) == _NBYTES
    assert slot.count(2) == _NBYTES
    if first_ends:  # the slot waits for another step while the rest of the first one arrives
        port.post(0, 5, memoryview(slot), pieces)
    _say(stager, lines[0], b"\x01" * half)
    assert RECEIPT.unpack(_said(stager, lines[0], RECEIPT.size)) == (1,)
    assert slot.count(1) == 0
    assert port.pop_received(0, 5) is None
    if not first_ends:
        port.post(0, 5, memoryview(slot), pieces)
    _say(stager, lines[1], PayloadHeader(3, 5, _NBYTES).to_bytes() + b"\x03" * _NBYTES)
    assert RECEIPT.unpack(_said(stager, lines[1], RECEIPT.size)) == (3,)
    assert port.pop_received(0, 5) == _NBYTES
    assert slot.count(3) == _NBYTES
    assert stager.lost == []


@pytest.mark.parametrize("nbytes", [_NBYTES, 2 * _NBYTES], ids=["as long", "longer"])
def test_half_a_payload_whose_slot_was_withdrawn_is_no_part_of_the_next_one(
    stager: TurnedStager, sockets: contextlib.ExitStack, nbytes: int
) -> None:
    _admitted(stager, sockets)
    payloads = _admitted(stager, sockets, channel=1)
    port, slot = stager.port, bytearray(2 * _NBYTES)
    assert port is not None
    port.post(0, 5, memoryview(slot), (Extent(0, _NBYTES),))
    half = _NBYTES // 2
    _say(stager, payloads, PayloadHeader(1, 5, _NBYTES).to_bytes() + b"\x01" * half)
    stager.until(lambda: slot.count(1) == half, "half of it")
    port.cancel(0, 5)
    port.post(0, 5, memoryview(slot), (Extent(0, nbytes),))
    _say(stager, payloads, b"\x01" * half)
    assert RECEIPT.unpack(_said(stager, payloads, RECEIPT.size)) == (1,)
    assert slot.count(1) == half
    assert port.pop_received(0, 5) is None, "it is neither the next one nor one of a wrong size"
    _say(stager, payloads, PayloadHeader(2, 5, nbytes).to_bytes() + b"\x02" * nbytes)
    assert RECEIPT.unpack(_said(stager, payloads, RECEIPT.size)) == (2,)
    assert port.pop_received(0, 5) == nbytes
    assert slot.count(2) == nbytes
