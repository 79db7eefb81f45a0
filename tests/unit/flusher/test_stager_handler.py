"""The flusher's messages to its stager fit the packets of the doorbell, however large the ring is."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from flusher.stager_handler import StagerHandler
from holdfast.ring.doorbell import MESSAGE_BYTES_MAX, Channel, Message
from holdfast.ring.ring import Ring
from holdfast.wire.failure_count import NO_FAILURES

_SLOTS = 20_000


def test_20000_slots_that_are_free_at_once_are_told_in_several_messages(tmp_path: Path) -> None:
    """When a stalled store answers, or the flusher drops a checkpoint, all of a large ring becomes free at once."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as held:
        stager, flusher = Channel(mine), Channel(theirs)
        held.callback(stager.close)
        held.callback(flusher.close)
        ring = held.enter_context(Ring.create(tmp_path / "run", chunk_bytes=4096, ring_chunks=8, attempt=1))
        handler = StagerHandler(flusher, ring, "file:///run")
        handler.welcome(NO_FAILURES, resumed=False)
        # The highest numbers that slots have: seven digits each.
        slots = tuple(range((1 << 20) - _SLOTS, 1 << 20))
        handler.freed(slots)
        heard: list[Message] = []
        for _ in range(100):
            flusher.flush()
            heard += stager.poll()
        told = [message for message in heard if message.kind == "freed"]
        assert not stager.closed
        assert not flusher.closed
        assert tuple(slot for message in told for slot in message.fields["slots"]) == slots
        assert len(told) == 5
        assert max(len(message.to_bytes()) for message in told) <= MESSAGE_BYTES_MAX
