"""The stager's loop: messages of the trainers, payloads, and the flusher in; the session's actions out.

    Port ── messages, payloads, who is dead ──► Session ──► Port    credits, verdicts
    Flusher ── began, freed, durable, failed ─►    └──────► Ring    FILLING, FULL, FREE    └► Flusher   doorbell

One thread. It never blocks on a peer; when nothing happens it sleeps on the flusher's socket, longer each time. The
loop ends when every trainer has left or is dead; the flusher is then told to finish, and waited for.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast import wire
from holdfast.config import StagerConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.events import EventLog
from holdfast.layout import Extent, Layout
from holdfast.ring import Ring, SlotState
from holdfast.session import Session
from holdfast.session_steps import (
    Abort,
    Action,
    Began,
    Begin,
    CancelReceive,
    ChunkFull,
    Decline,
    Done,
    Durable,
    Event,
    Failed,
    FillSlot,
    FreeSlot,
    GrantCredit,
    NewLayout,
    Offer,
    RankLost,
    Received,
    Returned,
    Sent,
    SlotsFreed,
    Staged,
    Tell,
    Tick,
)
from holdfast.wire import Agreement, Frame, Kind, Proposal, Welcome
from stager.agreement import Round
from stager.flusher_process import Flusher, attach

if TYPE_CHECKING:
    from stager.mpi import Port

__all__ = ["Service", "refuse_start"]

_log = logging.getLogger("holdfast.stager")

_BEAT_SECONDS = 5.0
_TICK_SECONDS = 0.25
_DRAIN_SECONDS_MAX = 600.0
_LEAVE_SECONDS_MAX = 10.0
_REATTACH_SECONDS_MAX = 20.0
_REATTACH_PAUSE_SECONDS = 30.0
_PAUSE_SECONDS_MIN = 50e-6
_BUSY_PAUSE_SECONDS_MAX = 0.5e-3  # while bytes are under way: sleeping longer would cost bandwidth
_IDLE_PAUSE_SECONDS_MAX = 5e-3
_STREAMING_SECONDS = 0.02  # scattered payloads come in fragments that move only while we poll


class Service:
    """Serves one MPI job.

    Args:
        config: Settings.
        port: The trainers.
        flusher: The attached flusher.
        events: Event log.
        clock: Seconds that only go forward; deadlines are measured with it.

    Attributes:
        lost_ranks: Trainers that died or were dropped, rather than left.
    """

    def __init__(
        self,
        config: StagerConfig,
        port: Port,
        flusher: Flusher,
        *,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._port, self._flusher = config, port, flusher
        self._events, self._clock = events, clock
        self._slots = _slot_memory(flusher.ring)
        free_slots, flusher_slots = _slot_owners(flusher.ring)
        self._session = Session(
            ranks=port.ranks,
            free_slots=free_slots,
            flusher_slots=flusher_slots,
            offer_seconds_max=config.offer_seconds_max,
            chunk_seconds_max=config.chunk_seconds_max,
        )
        self._round = Round(port.ranks, config.offer_seconds_max)
        self._present = set(range(port.ranks))
        self._offered_at: dict[int, float] = {}  # step → when the first rank offered it, and when all had
        self._begun_at: dict[int, float] = {}
        self._said = ""  # the last verdict that was logged
        self.lost_ranks: set[int] = set()
        # (rank, slot) → its credit (step, chunk, nbytes): posted; and those of which SENT has come: worth testing
        self._posted: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._arriving: set[tuple[int, int]] = set()
        self._attempts = {flusher.attempt}  # of this job; more than one after a flusher was started again
        self._flusher_gone = False
        self._reattach_at = 0.0
        self._drained = False
        self._beat_at = self._tick_at = 0.0
        self._active_at = 0.0
        self._pause_seconds = _PAUSE_SECONDS_MIN

    def run(self) -> None:
        """Serve until every trainer has left, then let the flusher finish.

        Raises:
            PeerLost: The flusher ended before all that was staged was durable.
        """
        while self._present:
            if self._turn():
                self._active_at = self._clock()
                self._pause_seconds = _PAUSE_SECONDS_MIN
            else:
                self._rest()
        self._finish()

    # -- one turn ------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Look at everything once; whether anything had happened."""
        seen = self._port.poll()
        for rank, message in seen.messages:
            if rank in self._present:
                self._hear(rank, message)
        for rank, reason in seen.lost:
            self._leave(rank, reason, loud=True)
        received = self._look_at_payloads()
        heard = self._hear_flusher()
        now = self._clock()
        if self._flusher_gone and now >= self._reattach_at and not self._session.outstanding():
            self._reattach(_REATTACH_SECONDS_MAX)
        if now >= self._tick_at:
            self._tick_at = now + _TICK_SECONDS
            self._take(Tick())
            self._answer(self._round.overdue(now))
        if now >= self._beat_at:
            self._beat_at = now + _BEAT_SECONDS
            for rank in self._present:
                self._port.send(rank, wire.encode(Kind.BEAT, attempt=self._flusher.attempt))
        return bool(seen.messages or seen.lost or received or heard)

    def _rest(self) -> None:
        """Give the core away; wake at once when the flusher says something."""
        if self._arriving and self._clock() - self._active_at < _STREAMING_SECONDS:
            time.sleep(0)
            return
        if self._flusher.channel.closed:
            time.sleep(self._pause_seconds)
        else:
            select.select([self._flusher.channel], [], [], self._pause_seconds)
        most = _IDLE_PAUSE_SECONDS_MAX if self._session.idle else _BUSY_PAUSE_SECONDS_MAX
        self._pause_seconds = min(most, self._pause_seconds * 1.3)

    def _look_at_payloads(self) -> bool:
        found = False
        for place in list(self._arriving):
            rank, slot = place
            nbytes = self._port.received(rank, slot)
            if nbytes is None:
                continue
            found = True
            self._arriving.discard(place)
            step, chunk, expected_bytes = self._posted.pop(place)
            if nbytes == expected_bytes:
                self._take(Received(rank, step, chunk), rank)
            else:
                self._broke_protocol(
                    rank,
                    ProtocolError(
                        f"rank {rank}: step {step}, chunk {chunk}: payload of {nbytes} bytes, expected {expected_bytes}"
                    ),
                )
        return found

    # -- trainers ------------------------------------------------------------------------------------------------

    def _hear(self, rank: int, message: bytes) -> None:
        try:
            frame = wire.decode(message)
            if frame.kind.from_stager:
                raise ProtocolError(f"{frame.kind.name} is not a message of trainers")
            if frame.kind not in {Kind.HELLO, Kind.BYE} and frame.attempt not in self._attempts:
                raise ProtocolError(
                    f"{frame.kind.name} of attempt {frame.attempt}, this job is attempt {self._flusher.attempt}"
                )
            self._hear_frame(rank, frame)
        except ProtocolError as error:
            self._broke_protocol(rank, error)

    def _hear_frame(self, rank: int, frame: Frame) -> None:
        match frame.kind:
            case Kind.HELLO:
                self._port.send(rank, self._welcome().to_frame())
            case Kind.PROPOSE:
                self._answer(self._round.propose(rank, Proposal.from_frame(frame), self._clock()))
            case Kind.LAYOUT:
                if rank != 0:
                    raise ProtocolError(f"LAYOUT from rank {rank}; only rank 0 announces layouts")
                layout = Layout.from_bytes(frame.body)
                ring_chunk_bytes = self._flusher.ring.chunk_bytes
                if layout.chunk_bytes != ring_chunk_bytes:
                    raise ProtocolError(
                        f"LAYOUT with chunks of {layout.chunk_bytes} bytes, the ring has {ring_chunk_bytes}"
                    )
                self._take(NewLayout(layout), rank)
            case Kind.OFFER:
                body = wire.json_body(frame, layout_digest=str)
                self._offered_at.setdefault(frame.step, self._clock())
                self._take(Offer(rank, frame.step, body.pop("layout_digest"), body), rank)
            case Kind.DECLINE:
                reason = frame.body.decode(errors="replace")[:2000]
                self._take(Decline(rank, frame.step, reason, frame.arg), rank)
            case Kind.SENT:
                self._take(Sent(rank, frame.step, frame.chunk, frame.arg, frame.flags), rank)
                self._arriving.update(
                    place
                    for place, (step, chunk, _) in self._posted.items()
                    if place[0] == rank and (step, chunk) == (frame.step, frame.chunk)
                )
            case Kind.RETURN:
                self._take(Returned(rank, frame.step, frame.chunk), rank)
            case Kind.DONE:
                self._take(Done(rank, frame.step, wire.json_body(frame)), rank)
            case Kind.BYE:
                self._leave(rank, f"rank {rank} has left", loud=False)

    def _welcome(self) -> Welcome:
        return Welcome(
            store_url=self._flusher.store_url,
            attempt=self._flusher.attempt,
            chunk_bytes=self._flusher.ring.chunk_bytes,
            ring_chunks=self._flusher.ring.ring_chunks,
            ranks=self._port.ranks,
            offer_seconds_max=self._config.offer_seconds_max,
            beat_seconds=_BEAT_SECONDS,
        )

    def _answer(self, answer: Agreement | HoldfastError | None) -> None:
        """Tell every rank how a round of proposals ended, if it did."""
        if answer is None:
            return
        attempt = self._flusher.attempt
        if isinstance(answer, Agreement):
            message = answer.to_frame(attempt)
        else:
            if isinstance(answer, StateError):
                _log.error("%s", answer)
            message = wire.encode(Kind.REFUSED, attempt=attempt, body=wire.to_json(_as_json(answer)))
        for rank in self._present:
            self._port.send(rank, message)

    def _broke_protocol(self, rank: int, error: ProtocolError) -> None:
        """Tell the rank why, and hear no more of it: after one wrong message the next cannot be trusted."""
        _log.error("rank %d broke the protocol and is dropped: %s", rank, error)
        self._port.send(
            rank, wire.encode(Kind.REFUSED, attempt=self._flusher.attempt, body=wire.to_json(_as_json(error)))
        )
        self._leave(rank, f"rank {rank} broke the protocol: {error}", loud=True)

    def _leave(self, rank: int, reason: str, *, loud: bool) -> None:
        if rank not in self._present:
            return
        self._present.discard(rank)
        if loud:
            _log.error("%s; what it had not sent is given up, the rest goes on", reason)
            self.lost_ranks.add(rank)
            self._events.emit("rank_lost", {"lost_rank": rank, "reason": reason})
        self._take(RankLost(rank, reason))
        self._answer(self._round.lost(reason))

    # -- flusher -------------------------------------------------------------------------------------------------

    def _hear_flusher(self) -> bool:
        if self._flusher_gone:
            return False
        channel = self._flusher.channel
        try:
            messages = channel.poll()
            for message in messages:
                self._hear_flusher_message(message.kind, message.fields)
        except ProtocolError as error:
            _log.error("the flusher broke the protocol: %s", error)
            channel.close()
            messages = []
        if channel.closed:
            self._lose_flusher()
        return bool(messages)

    def _hear_flusher_message(self, kind: str, fields: dict[str, Any]) -> None:
        if "step" in fields and fields["attempt"] != self._flusher.attempt:
            return  # about a checkpoint of the job before
        match kind:
            case "began":
                self._take(Began(fields["step"], fields["part_chunks"]))
            case "freed":
                self._take(SlotsFreed(tuple(fields["slots"])))
            case "durable":
                body = {"pgt2_seconds": fields["pgt2_seconds"], "file": fields["file"]}
                _log.info("step %d is durable: %s", fields["step"], fields["file"])
                self._take(Durable(fields["step"], body))
            case "failed":
                self._take(Failed(fields["step"], fields["code"], fields["message"]))
            case "bad":
                _log.error("step %d was read back and is bad: %s", fields["step"], fields["note"])
            case "verified":
                _log.info("step %d was read back and is good", fields["step"])
            case "drained":
                self._drained = True
            case _:
                raise ProtocolError(f"message {kind} is not expected from the flusher here")

    def _lose_flusher(self) -> None:
        """Give up what is under way, and tell the trainers; another flusher is started when no credit is out."""
        self._flusher_gone = True
        self._reattach_at = self._clock()
        if self._drained:
            return
        reason = f"the flusher (process {self._flusher.pid}) ended; what is staged is left to the next one"
        _log.error("%s", reason)
        self._events.emit("flusher_lost", {"pid": self._flusher.pid})
        self._do(self._session.refuse_all(reason))

    def _reattach(self, seconds_max: float) -> bool:
        """Find or start another flusher, which first publishes what the dead one left; whether it worked.

        Blocks for `seconds_max` at most: less than it takes for the trainers to think that the stager is dead.
        """
        old = self._flusher.ring
        config = self._config.model_copy(
            update={
                "start_seconds_max": seconds_max,
                "chunk_bytes": old.chunk_bytes,  # as the trainers were told
                "ring_bytes": old.chunk_bytes * old.ring_chunks,
            }
        )
        try:
            flusher = attach(config)
            if flusher.ring.chunk_bytes != old.chunk_bytes:
                flusher.close()
                raise ProtocolError(
                    f"its chunks are of {flusher.ring.chunk_bytes} bytes, not {old.chunk_bytes}"
                )
        except HoldfastError as error:
            self._reattach_at = self._clock() + _REATTACH_PAUSE_SECONDS
            _log.error("no other flusher: %s; tried again in %g s", error, _REATTACH_PAUSE_SECONDS)
            return False
        self._slots = []
        self._flusher.close()
        self._flusher, self._flusher_gone = flusher, False
        self._attempts.add(flusher.attempt)
        self._slots = _slot_memory(flusher.ring)
        free_slots, flusher_slots = _slot_owners(flusher.ring)
        self._session.reopen(free_slots=free_slots, flusher_slots=flusher_slots)
        self._events.emit("flusher_replaced", {"pid": flusher.pid, "attempt": flusher.attempt})
        _log.warning("another flusher (process %d) has taken over; checkpoints are taken again", flusher.pid)
        return True

    # -- actions -------------------------------------------------------------------------------------------------

    def _take(self, event: Event, rank: int | None = None) -> None:
        """Hand an event to the session and do what it says. What a rank did wrong counts against that rank."""
        try:
            actions = self._session.handle(event, self._clock())
        except ProtocolError as error:
            if rank is None:
                raise
            self._broke_protocol(rank, error)
            return
        self._do(actions)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._do_one(action)
            except (HoldfastError, OSError) as error:
                if not isinstance(action, Begin | Staged):
                    raise  # the journal is not what it was: nothing here can be trusted any more
                _log.error("step %d: %s", action.step, error)
                code = error.code if isinstance(error, HoldfastError) else ProtocolError.code
                self._take(Failed(action.step, code, f"stager: {error}"))

    def _do_one(self, action: Action) -> None:
        ring, channel, attempt = self._flusher.ring, self._flusher.channel, self._flusher.attempt
        match action:
            case GrantCredit():
                self._grant(action)
            case FillSlot(slot, step, chunk):
                ring.mark_filling(slot, attempt, step, chunk)
            case ChunkFull(slot, _, _, sources, nbytes):
                ring.mark_full(slot, sources, nbytes)
                channel.send("chunk", slot=slot)
            case FreeSlot(slot):
                ring.free(slot)
            case CancelReceive(rank, slot):
                self._port.cancel(rank, slot)
                self._posted.pop((rank, slot), None)
                self._arriving.discard((rank, slot))
            case Tell():
                self._tell(action)
            case Begin(step, layout):
                self._begun_at[step] = self._clock()
                ring.put_layout(layout)
                ring.write_checkpoint(attempt, step, "receiving", layout.digest, {})
                channel.send("begin", attempt=attempt, step=step, layout_digest=layout.digest)
            case Staged():
                self._staged(action)
            case Abort(step, reason):
                channel.send("abort", attempt=attempt, step=step, reason=reason[:2000])

    def _grant(self, action: GrantCredit) -> None:
        start = action.layout.chunk_extent(action.chunk).offset
        extents = action.layout.pieces(action.chunk, action.rank)
        pieces = tuple(Extent(extent.offset - start, extent.nbytes) for extent in extents)
        nbytes = sum(extent.nbytes for extent in extents)
        self._posted[action.rank, action.slot] = (action.step, action.chunk, nbytes)
        self._port.post(action.rank, action.slot, self._slots[action.slot], pieces)
        credit = wire.encode(
            Kind.CREDIT, attempt=self._flusher.attempt, step=action.step, chunk=action.chunk, arg=action.slot
        )
        self._port.send(action.rank, credit)

    def _tell(self, action: Tell) -> None:
        if action.kind in {Kind.FAILED, Kind.DECLINED} and action.rank is None:
            reason = action.body.get("message") or action.body.get("reason")
            self._offered_at.pop(action.step, None)
            self._begun_at.pop(action.step, None)
            # A slow store declines every step for the same reason: it is said once, and the events count them.
            if reason != self._said:
                _log.warning("step %d is %s: %s", action.step, action.kind.name.lower(), reason)
                self._said = str(reason)
            self._events.emit(action.kind.name.lower(), dict(action.body), step=action.step)
        message = wire.encode(
            action.kind, attempt=self._flusher.attempt, step=action.step, body=wire.to_json(action.body)
        )
        for rank in self._present if action.rank is None else (action.rank,):
            self._port.send(rank, message)

    def _staged(self, action: Staged) -> None:
        ring, attempt = self._flusher.ring, self._flusher.attempt
        staged_at_unix = time.time()
        saved = [record.get("saved_at_unix") for record in action.records.values()]
        known = [float(at) for at in saved if isinstance(at, (int, float))]
        pgt1_seconds = max(0.0, staged_at_unix - min(known)) if known else 0.0
        now, begun_at = self._clock(), self._begun_at.get(action.step, self._clock())
        stager = {
            "staged_at_unix": staged_at_unix,
            "pgt1_seconds": pgt1_seconds,
            "offers_seconds": begun_at - self._offered_at.get(action.step, begun_at),
            "receive_seconds": now - begun_at,
        }
        for times in (self._offered_at, self._begun_at):
            for step in [step for step in times if step <= action.step]:
                del times[step]
        record = {
            "ranks": {str(rank): dict(said) for rank, said in sorted(action.records.items())},
            "stager": stager,
        }
        ring.write_checkpoint(attempt, action.step, "staged", action.layout.digest, record)
        self._flusher.channel.send("staged", attempt=attempt, step=action.step)
        self._events.emit(
            "staged",
            {"pgt1_seconds": pgt1_seconds, "image_bytes": action.layout.image_bytes},
            step=action.step,
        )
        self._tell(Tell(None, Kind.STAGED, action.step, {"pgt1_seconds": pgt1_seconds}))

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """All trainers are gone: have the flusher make durable what is staged, and wait for it."""
        if self._flusher_gone:
            self._reattach(self._config.start_seconds_max)  # so that what the dead one left is published
        channel = self._flusher.channel
        channel.send("finish")
        deadline = self._clock() + _DRAIN_SECONDS_MAX
        while not self._drained and not self._flusher_gone:
            left_seconds = deadline - self._clock()
            if left_seconds <= 0:
                _log.error(
                    "the flusher (process %d) has not written all within %g s; it goes on by itself",
                    self._flusher.pid,
                    _DRAIN_SECONDS_MAX,
                )
                return
            select.select([channel], [], [], min(left_seconds, 1.0))
            self._hear_flusher()
        if not self._drained:
            raise PeerLost(
                f"the flusher (process {self._flusher.pid}) ended before all was durable; start the stager again on "
                f"{self._flusher.store_url}: it publishes what is whole in {self._flusher.ring.directory}"
            )


def refuse_start(port: Port, error: HoldfastError) -> None:
    """Tell every trainer why there will be no stager, and stay until they have heard it."""
    waiting = set(range(port.ranks))
    message = Welcome.refusal(error)
    deadline = time.monotonic() + _LEAVE_SECONDS_MAX
    while waiting and time.monotonic() < deadline:
        seen = port.poll()
        for rank, raw in seen.messages:
            try:
                kind = wire.decode(raw).kind
            except ProtocolError as broken:
                _log.warning("rank %d: %s", rank, broken)
                waiting.discard(rank)
                continue
            if kind is Kind.HELLO:
                port.send(rank, message)
            elif kind is Kind.BYE:
                waiting.discard(rank)
        waiting -= {rank for rank, _ in seen.lost}
        time.sleep(_IDLE_PAUSE_SECONDS_MAX)


def _slot_memory(ring: Ring) -> list[memoryview]:
    return [ring.slot_memory(slot) for slot in range(ring.ring_chunks)]


def _slot_owners(ring: Ring) -> tuple[list[int], list[int]]:
    """Slots that are free, and slots that the flusher still has to free."""
    free_slots: list[int] = []
    flusher_slots: list[int] = []
    for slot in range(ring.ring_chunks):
        (free_slots if ring.state(slot) is SlotState.FREE else flusher_slots).append(slot)
    return free_slots, flusher_slots


def _as_json(error: HoldfastError) -> dict[str, str]:
    return {"code": error.code, "message": str(error)[:60_000]}
