"""The stager's CPU time per frame by number of ranks: a real service, ring and doorbell, simulated ranks and flusher.

The transport moves no bytes here, so only the stager's own work remains: decoding messages, the session, the journal,
credits and doorbells. Only the service's turns are counted.
"""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from holdfast.config import StagerConfig
from holdfast.image.entries import REPLICATED, Entry, Extent
from holdfast.image.layout import Layout
from holdfast.ring.doorbell import Channel
from holdfast.ring.ring import Ring
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from stager.flusher_process import Flusher
from stager.service import StagerService
from stager.trainers_port import PollResult

__all__ = ["stager_per_frame"]

_CHUNK_BYTES = 4096
_FRAMES_PER_TURN = 4
_TURNS_MAX = 1_000_000
_STEP, _ATTEMPT = 1, 1


class StubPort:
    """Port with simulated ranks that answer each credit; sends nothing."""

    unsent = False

    def __init__(self, layout: Layout) -> None:
        self.ranks, self._layout = layout.ranks, layout
        self._seen = PollResult()
        self._credits: list[tuple[int, int, int]] = []  # rank, chunk, slot
        self._arrived: dict[tuple[int, int], int] = {}
        self.verdicts: list[Kind] = []

    def fileno(self) -> None:
        """Return None, as under MPI."""

    def unsent_to(self, rank: int) -> int:  # noqa: ARG002 - of no rank anything waits
        return 0

    def mark_left(self, rank: int) -> None:
        """Do nothing: nothing is kept about ranks."""

    def poll(self) -> PollResult:
        seen, self._seen = self._seen, PollResult()
        return seen

    def send(self, rank: int, message: bytes) -> None:
        frame = wire.decode(message)
        if frame.kind is Kind.CREDIT:
            self._credits.append((rank, frame.chunk, frame.arg))
        elif rank == 0:
            self.verdicts.append(frame.kind)

    def post(self, rank: int, slot: int, memory: memoryview, pieces: tuple[Extent, ...]) -> None:
        """Do nothing: a payload counts as received when the rank answers."""

    def pop_received(self, rank: int, slot: int) -> int | None:
        return self._arrived.pop((rank, slot), None)

    def cancel(self, rank: int, slot: int) -> None:
        """Do nothing: no receive is in flight."""

    # -- the ranks' side

    def say(self, rank: int, kind: Kind, **fields: Any) -> None:
        self._seen.messages.append((rank, wire.encode(kind, attempt=_ATTEMPT, step=_STEP, **fields)))

    def answer(self, most: int) -> int:
        """Answer the oldest credits with frames, at most `most`; return their number."""
        due, self._credits = self._credits[:most], self._credits[most:]
        for rank, chunk, slot in due:
            nbytes = sum(extent.nbytes for extent in self._layout.pieces(chunk, rank))
            self._arrived[rank, slot] = nbytes
            self.say(rank, Kind.SENT, chunk=chunk, arg=nbytes)
        return len(due)


def stager_per_frame(ranks: int, chunks: int, ring_chunks: int) -> dict[str, float]:
    """CPU seconds of the stager for one checkpoint of `chunks` frames.

    Args:
        ranks: Training ranks.
        chunks: The image's; each is one frame.
        ring_chunks: Slots of the ring.
    """
    layout = Layout(
        chunks * _CHUNK_BYTES,
        _CHUNK_BYTES,
        ranks,
        (Entry("a", 64, (chunks - 1) * _CHUNK_BYTES, REPLICATED, ()),),
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        ring = Ring.create(directory, chunk_bytes=_CHUNK_BYTES, ring_chunks=ring_chunks, attempt=_ATTEMPT)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flusher = Channel(theirs)
        port = StubPort(layout)
        config = StagerConfig(
            store=str(Path(folder) / "store"), chunk_bytes=_CHUNK_BYTES, ring_bytes=ring_chunks * _CHUNK_BYTES
        )
        attached = Flusher(Channel(mine), Ring.attach(directory), _ATTEMPT, "file:///run", 1)
        service = StagerService(config, port, attached, events=EventLog(None, role="stager"))
        try:
            return _play(service, port, flusher, ring, layout)
        finally:
            service.close()
            flusher.close()
            ring.close()


def _play(
    service: StagerService, port: StubPort, flusher: Channel, ring: Ring, layout: Layout
) -> dict[str, float]:
    for rank in range(layout.ranks):  # the stager decides on no offer before it has welcomed the rank
        port.say(rank, Kind.HELLO, body=b"{}")
    port.say(0, Kind.LAYOUT, body=layout.to_bytes())
    service._poll_once()
    body = wire.to_json({"layout_digest": layout.digest})
    for rank in range(layout.ranks):
        port.say(rank, Kind.OFFER, body=body)
    begin_seconds = _turn(service)
    seconds, frames, heard = 0.0, 0, 0
    for _ in range(_TURNS_MAX):
        frames += port.answer(_FRAMES_PER_TURN)
        seconds += _turn(service)
        heard += _flush(flusher, ring)
        if frames == heard == layout.chunks:
            break
    for rank in range(layout.ranks):
        port.say(rank, Kind.DONE, body=b"{}")
    end_seconds = _turn(service)
    if port.verdicts[-1:] != [Kind.STAGED]:
        raise RuntimeError(f"{frames} of {layout.chunks} frames, and it is not staged: {port.verdicts}")
    return {
        "ranks": layout.ranks,
        "frames": frames,
        "begin_seconds": begin_seconds,
        "frame_seconds": seconds / frames,
        "end_seconds": end_seconds,
    }


def _turn(service: StagerService) -> float:
    begun = time.thread_time()
    service._poll_once()
    return time.thread_time() - begun


def _flush(flusher: Channel, ring: Ring) -> int:
    """Free all full slots; return their number."""
    slots = []
    for message in flusher.poll():
        if message.kind == "begin":
            flusher.send("began", attempt=_ATTEMPT, step=_STEP, part_chunks=8)
        elif message.kind == "chunk":
            ring.free(message.fields["slot"])
            slots.append(message.fields["slot"])
    if slots:
        flusher.send("freed", slots=slots)
    return len(slots)
