"""One checkpoint of this rank in flight to the stager: credits in, frames out.

    accept_credit(chunk, slot) ──► credits ──┐
    source.is_ready(frame) ──────► CRC ──────┴─► pump: payload, SENT … all sent, all copied: DONE ─► released
    pop_unused_credits ───► RETURN for each unused credit; payloads in flight are completed ─► released

Rules: a frame is sent only under a credit, and only when its bytes are copied. Its CRC is computed as soon as they are,
mostly before the credit comes, so the stager gets the payload at once. Every credit is answered, by a payload and SENT
or by RETURN. The source is read until `released`, and not after.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.crc import crc32
from holdfast.faultpoint import Point, reach
from holdfast.image.layout import Layout
from holdfast.image.slices import frames_of
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from trainer_side.ranks.ports import StagerPort
from trainer_side.transfer import SliceSource, Transfer, TransferState

_FRAMES_IN_FLIGHT_MAX = 4
_STALL_SECONDS = 0.1  # much longer than a busy stager takes to begin a payload
# frames whose CRCs wait for credits: as many as come at once; more would only slow the copy
_FRAMES_AHEAD_MAX = 4
_FRAMES_CHECKED_MAX = 16  # for a ready frame without a CRC; frames become ready in about this order


@dataclass(frozen=True)
class SendPlan:
    """The frames of a layout that this rank sends."""

    layout: Layout
    frames: dict[int, tuple[int, int]]  # chunk → (offset in the source, bytes)
    pieces: dict[int, tuple[int, ...]]  # chunk → sizes of its pieces, if there are several

    def pieces_of(self, chunk: int) -> tuple[int, ...]:
        """Sizes of the pieces of this rank's frame in `chunk`."""
        return self.pieces.get(chunk) or (self.frames[chunk][1],)

    def is_streamed(self, chunk: int) -> bool:
        """Whether the transport splits this frame into fragments, which move only while it is polled."""
        pieces = len(self.pieces_of(chunk))
        return wire.payload_message_count(pieces) < pieces

    @classmethod
    def of(cls, layout: Layout, rank: int, chunks: range | None = None) -> SendPlan:
        """Plan the frames that `rank` sends into `chunks`; None: into all."""
        frames = [frame for frame in frames_of(layout, rank) if chunks is None or frame.chunk in chunks]
        return cls(
            layout,
            {frame.chunk: (frame.offset, frame.nbytes) for frame in frames},
            {
                frame.chunk: tuple(extent.nbytes for extent in frame.extents)
                for frame in frames
                if len(frame.extents) > 1
            },
        )


class Outgoing:
    """A transfer that still reads the source's memory, or waits for the stager's verdict. Link's thread only."""

    def __init__(self, transfer: Transfer, source: SliceSource, plan: SendPlan) -> None:
        self.transfer, self.plan = transfer, plan
        self._source: SliceSource | None = source  # None once released, so that its memory can be freed
        self._unsent = set(plan.frames)
        self._without_crc = list(plan.frames)
        self._crcs: dict[int, int] = {}  # of frames that are ready and not sent
        self._credits: dict[int, int] = {}  # chunk → slot
        self._sending: dict[int, int] = {}  # handle of a payload that the transport still reads → chunk
        self._is_done_sent = False
        self._sent_frames = 0
        self._progress = (-1, 0.0)  # number of sent frames, and since when
        self._needs_polling = False  # payloads move only while the transport is polled
        transfer.frames, transfer.frames_left = len(plan.frames), len(plan.frames)

    @property
    def is_sending(self) -> bool:
        """Whether the transport still reads a payload."""
        return bool(self._sending)

    def is_streaming(self, port: StagerPort) -> bool:
        """Whether a payload is in flight that moves only while the transport is polled.

        On one machine the stager reads other payloads straight from this process's memory; if the system forbids that,
        `check_stall` finds out.
        """
        if not self._sending or port.has_threads:
            return False
        return (
            self._needs_polling
            or not port.one_machine
            or any(self.plan.is_streamed(chunk) for chunk in self._sending.values())
        )

    def check_stall(self, now: float) -> bool:
        """Check whether sending has stalled so long that the transport needs polling; True when this is new."""
        if not self._sending or self._progress[0] != self._sent_frames:
            self._progress = (self._sent_frames, now)
        stalled = now - self._progress[1] > _STALL_SECONDS and not self._needs_polling
        self._needs_polling = self._needs_polling or stalled
        return stalled

    @property
    def is_finished(self) -> bool:
        """Whether its outcome is final and its memory is released."""
        return self.transfer.state.is_final and self.transfer.released.is_set()

    def offer(self, port: StagerPort, attempt: int) -> None:
        body = {**self.transfer.record.to_json(), "layout_digest": self.plan.layout.digest}
        port.send(wire.encode(Kind.OFFER, attempt=attempt, step=self.transfer.step, body=wire.to_json(body)))

    def accept_credit(self, chunk: int, slot: int) -> bool:
        """Take a credit; return False if it has no use and must be returned."""
        if self.transfer.state.is_final or chunk not in self._unsent:
            return False
        self._credits[chunk] = slot
        if self.transfer.state is TransferState.OFFERED:
            self.transfer.set_state(TransferState.SENDING)
        return True

    def pump(self, port: StagerPort, attempt: int) -> bool:
        """Send frames that are credited and ready, and note payloads that were read; return whether anything moved."""
        moved = False
        for handle in [handle for handle in self._sending if port.is_sent(handle)]:
            del self._sending[handle]
            self._sent_frames += 1
            moved = True
        transfer = self.transfer
        if not transfer.state.is_final:
            source = self._source
            ready = [
                chunk
                for chunk in sorted(self._credits)
                if source and source.is_ready(self.plan.frames[chunk][0])
            ]
            for chunk in ready[: max(0, _FRAMES_IN_FLIGHT_MAX - len(self._sending))]:
                self._send(port, attempt, chunk, self._credits.pop(chunk))
                moved = True
            moved = moved or self._sum_next()
            # A rank may have no frame for this stager, which gets its record and fingerprints all the same.
            if not self._unsent and not self._is_done_sent and source and source.is_complete():
                self._is_done_sent = moved = True
                reach(Point.SLICE_SENT)
                self._send_done(port, attempt)
        if (
            not self._sending
            and (self._is_done_sent or transfer.state.is_final)
            and not transfer.released.is_set()
        ):
            moved = True
            if transfer.state in {TransferState.OFFERED, TransferState.SENDING}:
                transfer.set_state(TransferState.SENT)
            self.release()
        return moved

    def _sum_next(self) -> bool:
        """Compute the CRC of one frame that has become ready; False if no frame has."""
        source = self._source
        if source is None or len(self._crcs) >= _FRAMES_AHEAD_MAX:  # None: all is sent
            return False
        for place, chunk in enumerate(self._without_crc[:_FRAMES_CHECKED_MAX]):
            if source.is_ready(self.plan.frames[chunk][0]):
                del self._without_crc[place]
                self._crcs[chunk] = self._sum(source, chunk)
                return True
        return False

    def _sum(self, source: SliceSource, chunk: int) -> int:
        begun = time.perf_counter()
        crc = crc32(source.view(*self.plan.frames[chunk]))
        record = self.transfer.record
        record.crc_seconds = (record.crc_seconds or 0.0) + time.perf_counter() - begun
        return crc

    def pop_unused_credits(self) -> list[int]:
        """Hand out the chunks whose credits must be returned, after this checkpoint is given up."""
        chunks = sorted(self._credits)
        self._credits.clear()
        return chunks

    def release(self) -> None:
        """Note that the source's memory is not read any more."""
        self._source = None
        self.transfer.release()

    def retry(self) -> Outgoing | None:
        """Return a new object that sends the transfer once more; None if its step has ended."""
        source = self.transfer.reoffer()
        return None if source is None else Outgoing(self.transfer, source, self.plan)

    def mark_staged(self) -> None:
        """Note that the stager has all frames, even if they were sent to an earlier process of it."""
        self._unsent.clear()
        self._is_done_sent = True

    def drop_in_flight(self) -> None:
        """Forget payloads in flight, since their reader is gone."""
        self._sending.clear()

    def _send(self, port: StagerPort, attempt: int, chunk: int, slot: int) -> None:
        offset, nbytes = self.plan.frames[chunk]
        assert self._source is not None
        payload = self._source.view(offset, nbytes)
        if chunk in self._crcs:
            crc = self._crcs.pop(chunk)
        else:
            self._without_crc.remove(chunk)
            crc = self._sum(self._source, chunk)
        record = self.transfer.record
        record.sent_bytes = (record.sent_bytes or 0) + nbytes
        self._sending[port.send_payload(payload, slot, self.plan.pieces_of(chunk))] = chunk
        self._unsent.discard(chunk)
        self.transfer.frames_left = len(self._unsent)
        reach(Point.FRAME_SENT)
        port.send(
            wire.encode(
                Kind.SENT, attempt=attempt, step=self.transfer.step, chunk=chunk, arg=nbytes, flags=crc
            )
        )

    def _send_done(self, port: StagerPort, attempt: int) -> None:
        body = self.transfer.final_message()
        port.send(wire.encode(Kind.DONE, attempt=attempt, step=self.transfer.step, body=wire.to_json(body)))
