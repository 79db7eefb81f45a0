"""Serves the chunks of checkpoints that are still in the ring to ranks that restore.

    FETCH: HELD      every checkpoint of which a slot still holds chunks (holdfast/ring/remains.py)
           LAYOUT    the layout file beside the ring
           PLACE     the ring's directory: ranks of this machine read the ring directly (holdfast/ring/near_ring.py)
           BYTES     bytes of a chunk, copied out of the slot ─► FETCHED
           PROOF     what the step after a checkpoint used (holdfast/ring/proofs.py)

Only this thread fills slots, so no other checkpoint's bytes can enter a slot between the check of its record and the
end of the copy. The flusher may write CRC fields into the slot meanwhile; the rank ignores them. The rank checks the
senders' CRCs, and reads from the store if bytes are gone or damaged.
"""

from __future__ import annotations

from collections import deque

from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.process import boot_id
from holdfast.ring.near_ring import RingLocation
from holdfast.ring.proofs import find_proof
from holdfast.ring.remains import ANSWER_BYTES_MAX, FetchKind, encode_held, held_checkpoints
from holdfast.ring.ring import Ring
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from stager.flusher_line import FlusherConnection
from stager.trainers_port import TrainersPort

_UNSENT_MAX = 2  # answers in flight to one rank: more would only take memory
_WAITING_MAX = 1024  # requests of one rank
_QUESTION_BYTES_MAX = 256


class Fetches:
    """The ranks' pending FETCH requests. All methods belong to the loop's thread."""

    def __init__(self, port: TrainersPort, line: FlusherConnection) -> None:
        self._port, self._line = port, line
        self._waiting: dict[int, deque[Frame]] = {}
        self._slots: dict[tuple[int, int, int], int] = {}  # attempt, step, chunk → where it was seen
        # Reused for each copy: fresh memory would cost more time than everything else here.
        self._copied = bytearray()

    @property
    def busy(self) -> bool:
        """Whether a rank waits for an answer."""
        return bool(self._waiting)

    def handle(self, rank: int, frame: Frame) -> None:
        """Queue a rank's FETCH. Raises `ProtocolError`: the request is invalid."""
        if frame.flags not in set(FetchKind):
            raise ProtocolError(
                f"FETCH from rank {rank}: flags {frame.flags}, expected 0 to {len(FetchKind) - 1}"
            )
        if len(frame.body) > _QUESTION_BYTES_MAX:
            raise ProtocolError(
                f"FETCH from rank {rank}: a question of {len(frame.body)} bytes, expected at most {_QUESTION_BYTES_MAX}"
            )
        if FetchKind(frame.flags) is FetchKind.BYTES:
            body = wire.json_body(frame, offset=int, nbytes=int)
            if not (body["offset"] >= 0 and 0 < body["nbytes"] <= ANSWER_BYTES_MAX):
                raise ProtocolError(
                    f"FETCH from rank {rank}: {body['nbytes']} bytes from {body['offset']}, expected at most "
                    f"{ANSWER_BYTES_MAX}"
                )
        waiting = self._waiting.setdefault(rank, deque())
        if len(waiting) >= _WAITING_MAX:
            raise ProtocolError(f"FETCH from rank {rank}: {_WAITING_MAX} requests of it are not answered yet")
        waiting.append(frame)

    def drop_requests(self, rank: int) -> None:
        """Drop the requests of a rank that has left."""
        self._waiting.pop(rank, None)

    def answer(self) -> bool:
        """Answer pending requests, each rank's in order, until its queue is full; whether any was answered."""
        answered = False
        for rank, waiting in list(self._waiting.items()):
            while waiting and self._port.unsent_to(rank) < _UNSENT_MAX:
                self._port.send(rank, self._answer(waiting.popleft()))
                answered = True
            if not waiting:
                del self._waiting[rank]
        return answered

    def _answer(self, frame: Frame) -> bytes:
        ring = self._line.flusher.ring
        body: bytes | memoryview | None = None
        match FetchKind(frame.flags):
            case FetchKind.HELD:
                held = held_checkpoints(ring)
                self._slots = {
                    (one.attempt, one.step, chunk): record.slot
                    for one in held
                    for chunk, record in one.chunks.items()
                }
                body = encode_held(held)
            case FetchKind.LAYOUT:
                body = _layout(ring, frame.body.decode(errors="replace"))
            case FetchKind.PLACE:
                body = self._place(ring)
            case FetchKind.PROOF:
                found = find_proof(ring.directory, CheckpointId(frame.arg, frame.step))
                body = None if found is None else found.to_bytes()
            case FetchKind.BYTES:
                body = self._bytes(ring, frame)
        is_available = body is not None and len(body) <= wire.MAX_BODY_BYTES
        return wire.encode(
            Kind.FETCHED,
            attempt=self._line.flusher.attempt,
            step=frame.step,
            chunk=frame.chunk,
            flags=frame.flags,
            arg=int(is_available),
            body=body if body is not None and is_available else b"",
        )

    def _place(self, ring: Ring) -> bytes | None:
        if not ring.token:
            return None
        return RingLocation(str(ring.directory), self._line.flusher.attempt, ring.token, boot_id()).to_bytes()

    def _bytes(self, ring: Ring, frame: Frame) -> memoryview | None:
        wanted = wire.json_body(frame, offset=int, nbytes=int)
        end = wanted["offset"] + wanted["nbytes"]
        chunk_key = (frame.arg, frame.step, frame.chunk)
        slot = self._slots.get(chunk_key)
        record = ring.remains_in(slot) if slot is not None and slot < ring.ring_chunks else None
        if record is None or (record.attempt, record.step, record.chunk) != chunk_key or end > record.nbytes:
            return None
        if len(self._copied) < wanted["nbytes"]:
            self._copied = bytearray(wanted["nbytes"])
        copied = memoryview(self._copied)[: wanted["nbytes"]]
        copied[:] = ring.slot_memory(record.slot)[wanted["offset"] : end]
        return copied


def _layout(ring: Ring, digest: str) -> bytes | None:
    try:
        return ring.layout(digest).to_bytes()
    except (ProtocolError, OSError):
        return None
