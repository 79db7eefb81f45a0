"""Stager and flusher over a real unix socket, and their reaction to a misbehaving peer."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import PeerLost, ProtocolError
from holdfast.ring import doorbell as ipc
from holdfast.ring.doorbell import MESSAGE_BYTES_MAX, VERSION, Channel, Listener, Message, connect


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(tmp_path / "flusher.sock")
    yield made
    made.close()


@pytest.fixture
def pair(listener: Listener) -> Iterator[tuple[Channel, Channel]]:
    stager = connect(listener.path)
    flusher = listener.accept()
    assert flusher is not None
    yield stager, flusher
    stager.close()
    flusher.close()


def raw_pair() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), theirs


def test_messages_keep_order_and_fields(pair: tuple[Channel, Channel]) -> None:
    stager, flusher = pair
    assert flusher.poll() == []
    stager.send("hello", version=VERSION, pid=5, attempt=0, share=[0, 1], lead_attempt=0)
    stager.send("chunk", slot=3, note="a field that this version does not know")
    hello, chunk = flusher.poll()
    assert (hello.kind, hello.fields["pid"]) == ("hello", 5)
    assert chunk.fields["slot"] == 3
    flusher.send("freed", slots=[3, 4])
    assert [message.fields["slots"] for message in stager.poll()] == [[3, 4]]
    assert stager.peer_pid == os.getpid()


def test_messages_sent_before_the_end_are_still_heard(pair: tuple[Channel, Channel]) -> None:
    stager, flusher = pair
    stager.send("finish")
    stager.close()
    flusher.send("drained")  # nobody hears it, nothing happens
    assert [message.kind for message in flusher.poll()] == ["finish"]
    assert flusher.closed
    assert flusher.poll() == []
    flusher.send("drained")


def test_last_words_arrive_although_the_peer_had_not_read(pair: tuple[Channel, Channel]) -> None:
    stager, flusher = pair
    stager.send("hello", version=VERSION, pid=5, attempt=0, share=[0, 1], lead_attempt=0)
    flusher.send("refused", code="fenced", message="no")
    flusher.close()
    assert [message.kind for message in stager.poll()] == ["refused"]
    assert stager.closed


def test_a_full_socket_keeps_messages_for_later(pair: tuple[Channel, Channel]) -> None:
    stager, flusher = pair
    for slot in range(2000):
        stager.send("chunk", slot=slot)
    assert stager.unsent > 0
    seen: list[int] = []
    while stager.unsent or len(seen) < 2000:
        seen += [message.fields["slot"] for message in flusher.poll()]
        stager.flush()
    assert seen == list(range(2000))


def test_a_peer_that_never_reads_is_given_up(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    stager, _ = pair
    monkeypatch.setattr(ipc, "_OUTBOX_MESSAGES_MAX", 10)
    for slot in range(2000):
        stager.send("chunk", slot=slot)
    assert stager.closed


def test_a_second_stager_is_refused_with_the_reason(
    listener: Listener, pair: tuple[Channel, Channel]
) -> None:
    second = connect(listener.path)
    second.send("hello", version=VERSION, pid=9, attempt=0, share=[0, 1], lead_attempt=0)
    assert listener.accept(busy="process 5 is attached") is None
    (refused,) = second.poll()
    assert refused.fields["message"] == "process 5 is attached"
    assert refused.fields["code"] == "fenced"
    assert second.closed
    assert listener.accept() is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"[1]", "unknown kind"),
        (b'{"kind":["chunk"]}', "unknown kind"),
        (b'{"kind":"format"}', "unknown kind"),
        (b'{"kind":"chunk"}', "chunk: field slot is None"),
        (b'{"kind":"chunk","slot":true}', "chunk: field slot is True"),
        (b'{"kind":"chunk","slot":1.0}', "chunk: field slot"),
        (b'{"kind":"chunk","slot":-1}', "chunk: field slot is -1"),
        (b'{"kind":"chunk","slot":9223372036854775808}', "chunk: field slot is 9223372036854775808"),
        (b'{"kind":"freed","slots":[1,"2"]}', "freed: field slots has an item"),
        (b'{"kind":"begin","attempt":1,"step":1,"layout_digest":7}', "begin: field layout_digest"),
    ],
)
def test_malformed_packets_are_refused(data: bytes, message: str) -> None:
    channel, theirs = raw_pair()
    theirs.send(data)
    with pytest.raises(ProtocolError, match=message):
        channel.poll()
    channel.close()
    theirs.close()


def test_packets_above_the_limit_are_refused_on_both_sides() -> None:
    channel, theirs = raw_pair()
    theirs.send(b"x" * (MESSAGE_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match="above 65536"):
        channel.poll()
    with pytest.raises(ProtocolError, match="at most 65536"):
        channel.send("abort", attempt=1, step=1, reason="x" * MESSAGE_BYTES_MAX)
    channel.close()
    theirs.close()


def test_sending_what_the_protocol_does_not_have_is_our_own_error() -> None:
    with pytest.raises(ProtocolError, match="begin: field step"):
        Message("begin", {"attempt": 1, "layout_digest": "x"}).to_bytes()


def test_connecting_to_no_listener_is_peer_lost(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=r"no flusher listens.*start the job again"):
        connect(tmp_path / "flusher.sock", wait_seconds=0.05)
    listener = Listener(tmp_path / "flusher.sock")
    listener._socket.close()  # as after a kill: the name stays, nobody answers
    with pytest.raises(PeerLost, match="refused"):
        connect(tmp_path / "flusher.sock")
    Listener(tmp_path / "flusher.sock").close()  # the stale name is replaced
    assert not (tmp_path / "flusher.sock").exists()


_STRANGER = """
import os, socket, sys
os.setgid(12345), os.setuid(12345)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
print(len(s.recv(100)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_turned_away() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        listener = Listener(Path(name) / "flusher.sock")
        listener.path.chmod(0o666)
        stranger = subprocess.Popen(
            [sys.executable, "-c", _STRANGER, str(listener.path)], stdout=subprocess.PIPE, text=True
        )
        select.select([listener], [], [], 30)
        assert listener.accept() is None
        assert stranger.communicate(timeout=30)[0].strip() == "0"  # closed without a word
        assert stranger.returncode == 0
        listener.close()


def test_deep_directories_are_no_problem(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    listener = Listener(deep / "flusher.sock")
    stager = connect(deep / "flusher.sock")
    flusher = listener.accept()
    assert flusher is not None
    flusher.close()
    stager.close()
    listener.close()
