"""The stager's loop: messages of the trainers, payloads, and the flusher in; the session's actions out.

    Trainers ── messages, who is silent or dead ─┐               ┌─► Trainers     credits, verdicts, beats
    Payloads ── what has arrived ────────────────┼─► Session ────┼─► Payloads     receives
    FlusherLine ── began, freed, durable, failed ┘               ├─► Ring         FILLING, FULL, FREE
                                                                 └─► FlusherLine  doorbell
One thread. It never blocks on a peer; when nothing happens it sleeps on the flusher's socket, longer each time. A
flusher that dies changes nothing for the trainers: another one is found meanwhile, and told what the session knows. The
loop ends when every trainer has left or is dead; the flusher is then told to finish, and waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast import wire
from holdfast.agreement import Round
from holdfast.config import StagerConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.events import EventLog
from holdfast.keeper import is_kept
from holdfast.layout import Layout
from holdfast.ring import Ring, SlotState
from holdfast.session import Session
from holdfast.session_steps import (
    Action,
    Began,
    Begin,
    Decline,
    Done,
    Durable,
    Event,
    Failed,
    FlusherGone,
    NewLayout,
    Offer,
    RankBack,
    RankLost,
    RankSilent,
    Received,
    Returned,
    Sent,
    SlotsFreed,
    Staged,
    Tick,
)
from holdfast.status.said import RankSaid
from holdfast.wire import Agreement, Frame, Kind, Proposal, Welcome
from stager.actions import Actions
from stager.fetches import Fetches
from stager.flusher_line import FlusherLine
from stager.flusher_process import Flusher, log_path, reap
from stager.inheritance import Inheritance
from stager.notices import Notices
from stager.paces import Paces
from stager.payloads import Payloads
from stager.replay import replay
from stager.trainers import Trainers

if TYPE_CHECKING:
    from stager.mpi import Port

__all__ = ["Service"]

_log = logging.getLogger("holdfast.stager")

_TICK_SECONDS = 0.25
_DRAIN_SECONDS_MAX = 600.0
_DRAIN_FAILURES_MAX = 8  # flushers in a row that did nothing, with pauses of half a minute in all
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
        self._config, self._port = config, port
        self._events, self._clock = events, clock
        self._line = FlusherLine(config, flusher, events=events, clock=clock)
        self._trainers = Trainers(port, rank_seconds_max=config.rank_seconds_max, clock=clock)
        self._payloads = Payloads(port, flusher.ring)
        free_slots, flusher_slots = _slot_owners(flusher.ring)
        self._session = Session(
            ranks=port.ranks,
            free_slots=free_slots,
            flusher_slots=flusher_slots,
            offer_seconds_max=config.offer_seconds_max,
            chunk_seconds_max=config.chunk_seconds_max,
            on_divergence=config.on_divergence,
        )
        self._round = Round(port.ranks, config.offer_seconds_max)
        self._notices = Notices(
            config,
            self._trainers,
            lambda: self._session.in_flight(clock()),
            events,
            attempt=lambda: self._line.flusher.attempt,
            clock=clock,
        )
        self._paces = Paces(self._trainers, events, attempt=lambda: self._line.flusher.attempt, clock=clock)
        self._actions = Actions(
            self._line, self._trainers, self._payloads, self._notices, events, clock=clock
        )
        self._fetches = Fetches(port, self._line)
        self._inheritance = Inheritance(config.start_seconds_max / 2, clock=clock)  # the ranks wait, too
        self._unwelcomed: set[int] = set()
        self._attempts = {flusher.attempt}  # of this job; more than one after a ring could not be kept
        self._next_flusher: Flusher | None = None  # has another ring, and waits for the credits into this one
        self._drained = False
        self._tick_at = 0.0
        self._active_at = 0.0
        self._pause_seconds = _PAUSE_SECONDS_MIN

    @property
    def lost_ranks(self) -> set[int]:
        """Trainers that died or were dropped, rather than left."""
        return self._trainers.lost

    def ranks_said(self) -> list[RankSaid]:
        """What is known of each rank, for `holdfast status`. From any thread."""
        return self._trainers.said()

    def run(self) -> None:
        """Serve until every trainer has left, then let the flusher finish.

        Raises:
            PeerLost: The flusher ended before all that was staged was durable, and so did those started after it.
        """
        while self._trainers.present:
            if self._turn():
                self._active_at = self._clock()
                self._pause_seconds = _PAUSE_SECONDS_MIN
            else:
                self._rest()
        self._finish()

    def close(self) -> None:
        """Leave ring and flusher, which goes on by itself."""
        self._payloads.close()
        if self._next_flusher is not None:
            self._next_flusher.close()
        self._line.close()

    # -- one turn ------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Look at everything once; whether anything had happened."""
        seen = self._port.poll()
        for rank, message in seen.messages:
            if rank in self._trainers.present:
                self._hear(rank, message)
        for rank, reason in seen.lost:
            self._leave(rank, f"{reason} ({self._trainers.name(rank)})", loud=True)
        received = self._look_at_payloads()
        answered = self._fetches.answer()
        heard = self._hear_flusher()
        self._mend_line()
        now = self._clock()
        if now >= self._tick_at:
            self._tick_at = now + _TICK_SECONDS
            self._tick(now)
        return bool(seen.messages or seen.lost or received or answered or heard)

    def _tick(self, now: float) -> None:
        reap()
        if self._line.cut:
            self._take(FlusherGone(self._line.cut))  # again: by now more may be known of why
        self._take(Tick())
        self._notices.tick()
        self._paces.tick()
        self._answer(self._round.overdue(now))
        self._greet()
        self._beat()

    def _rest(self) -> None:
        """Give the core away; wake at once when the flusher says something."""
        if (
            self._payloads.arriving or self._fetches.busy or self._port.unsent
        ) and self._clock() - self._active_at < _STREAMING_SECONDS:
            time.sleep(0)
            return
        self._line.wait(self._pause_seconds)
        most = _IDLE_PAUSE_SECONDS_MAX if self._session.idle else _BUSY_PAUSE_SECONDS_MAX
        self._pause_seconds = min(most, self._pause_seconds * 1.3)

    def _look_at_payloads(self) -> bool:
        arrivals = self._payloads.look()
        for rank, step, chunk, nbytes, expected_bytes in arrivals:
            if nbytes == expected_bytes:
                self._take(Received(rank, step, chunk), rank)
                continue
            what = f"step {step}, chunk {chunk}: payload of {nbytes} bytes, expected {expected_bytes}"
            self._broke_protocol(rank, ProtocolError(f"rank {rank}: {what}"))
        return bool(arrivals)

    def _beat(self) -> None:
        """Give the ranks a sign of life, and look whose is missing."""
        for rank, seconds in self._trainers.beat(self._line.flusher.attempt):
            name = self._trainers.name(rank)
            _log.error(
                "%s HAS BEEN SILENT for %.0f s: stopped, cut off, or gone; what it had not sent is given up, "
                "and no checkpoint is taken until it is heard again",
                name,
                seconds,
            )
            self._events.emit("rank_silent", {"silent_rank": rank, "name": name, "seconds": seconds})
            self._take(RankSilent(rank, name, seconds))
            self._paces.silent(f"{name} has been silent")

    # -- trainers ------------------------------------------------------------------------------------------------

    def _hear(self, rank: int, message: bytes) -> None:
        silence = self._trainers.heard(rank)
        if silence is not None:
            name = self._trainers.name(rank)
            _log.warning("%s is heard again after %.0f s; checkpoints go on", name, silence.seconds)
            self._events.emit("rank_back", {"silent_rank": rank, "name": name, "seconds": silence.seconds})
            self._take(RankBack(rank))
        try:
            frame = wire.decode(message)
            if frame.kind.from_stager:
                raise ProtocolError(f"{frame.kind.name} is not a message of trainers")
            if frame.kind not in {Kind.HELLO, Kind.BYE} and frame.attempt not in self._attempts:
                raise ProtocolError(
                    f"{frame.kind.name} of attempt {frame.attempt}, this job is attempt {self._line.flusher.attempt}"
                )
            if frame.kind in {Kind.NOTICE, Kind.AT}:
                self._notices.hear(rank, frame)
            elif frame.kind in {Kind.WISH, Kind.HERE}:
                self._paces.hear(rank, frame)
            elif frame.kind is Kind.FETCH:
                self._fetches.hear(rank, frame)
            elif frame.kind is not Kind.BEAT:  # it was heard, which is all that says
                self._hear_frame(rank, frame)
        except ProtocolError as error:
            self._broke_protocol(rank, error)

    def _hear_frame(self, rank: int, frame: Frame) -> None:
        match frame.kind:
            case Kind.HELLO:
                self._trainers.hello(rank, frame)
                self._unwelcomed.add(rank)
                self._greet()
            case Kind.PROPOSE:
                self._answer(self._round.propose(rank, Proposal.from_frame(frame), self._clock()))
            case Kind.LAYOUT:
                if rank != 0:
                    raise ProtocolError(f"LAYOUT from rank {rank}; only rank 0 announces layouts")
                layout = Layout.from_bytes(frame.body)
                ring_chunk_bytes = self._line.flusher.ring.chunk_bytes
                if layout.chunk_bytes != ring_chunk_bytes:
                    raise ProtocolError(
                        f"LAYOUT with chunks of {layout.chunk_bytes} bytes, the ring has {ring_chunk_bytes}"
                    )
                self._take(NewLayout(layout), rank)
            case Kind.OFFER:
                body = wire.json_body(frame, layout_digest=str)
                self._actions.offered(frame.step)
                self._trainers.spoke(rank, frame.step)
                self._notices.offered(frame.step)
                self._take(Offer(rank, frame.step, body.pop("layout_digest"), body), rank)
            case Kind.DECLINE:
                reason = frame.body.decode(errors="replace")[:2000]
                self._trainers.spoke(rank, frame.step)
                self._notices.offered(frame.step)
                self._take(Decline(rank, frame.step, reason, frame.arg), rank)
            case Kind.SENT:
                self._take(Sent(rank, frame.step, frame.chunk, frame.arg, frame.flags), rank)
                self._payloads.announced(rank, frame.step, frame.chunk)
            case Kind.RETURN:
                self._take(Returned(rank, frame.step, frame.chunk), rank)
            case Kind.DONE:
                self._take(Done(rank, frame.step, wire.json_body(frame)), rank)
            case Kind.BYE:
                self._leave(rank, f"rank {rank} has left", loud=False)

    def _greet(self) -> None:
        """Welcome the ranks that have come, when restore would see everything that earlier jobs have staged."""
        flusher = self._line.flusher
        if not self._unwelcomed:
            return
        for rank in self._unwelcomed:
            self._trainers.heard(rank)  # it waits for us, and answers no beats before it is welcome
        if self._inheritance.settled(flusher.ring, flusher.attempt):
            for rank in self._unwelcomed & self._trainers.present:
                self._trainers.send(rank, self._welcome().to_frame())
            self._unwelcomed.clear()

    def _welcome(self) -> Welcome:
        flusher = self._line.flusher
        return Welcome(
            store_url=flusher.store_url,
            attempt=flusher.attempt,
            chunk_bytes=flusher.ring.chunk_bytes,
            ring_chunks=flusher.ring.ring_chunks,
            ranks=self._port.ranks,
            offer_seconds_max=self._config.offer_seconds_max,
            beat_seconds=self._trainers.beat_seconds,
        )

    def _answer(self, answer: Agreement | HoldfastError | None) -> None:
        """Tell every rank how a round of proposals ended, if it did."""
        if answer is None:
            return
        attempt = self._line.flusher.attempt
        if isinstance(answer, Agreement):
            message = answer.to_frame(attempt)
        else:
            if isinstance(answer, StateError):
                _log.error("%s", answer)
            message = wire.encode(Kind.REFUSED, attempt=attempt, body=wire.error_body(answer))
        self._trainers.send_all(message)

    def _broke_protocol(self, rank: int, error: ProtocolError) -> None:
        """Tell the rank why, and hear no more of it: after one wrong message the next cannot be trusted."""
        _log.error("rank %d broke the protocol and is dropped: %s", rank, error)
        attempt = self._line.flusher.attempt
        refused = wire.encode(Kind.REFUSED, attempt=attempt, body=wire.error_body(error))
        self._trainers.send(rank, refused)
        self._leave(rank, f"rank {rank} broke the protocol: {error}", loud=True)

    def _leave(self, rank: int, reason: str, *, loud: bool) -> None:
        if rank not in self._trainers.present:
            return
        self._trainers.leave(rank, lost=loud)
        self._fetches.left(rank)
        if loud:
            _log.error("%s; what it had not sent is given up, the rest goes on", reason)
            self._events.emit("rank_lost", {"lost_rank": rank, "reason": reason})
        self._notices.left(rank, reason)  # first: what the session gives up for it is then not tried again
        self._paces.left(reason, lost=loud)
        self._take(RankLost(rank, reason))
        self._answer(self._round.lost(reason))

    # -- flusher -------------------------------------------------------------------------------------------------

    def _hear_flusher(self) -> bool:
        messages = self._line.poll()
        try:
            for message in messages:
                self._hear_flusher_message(message.kind, message.fields)
        except ProtocolError as error:
            self._line.hang_up(error)
        if not self._drained and self._line.notice_end():
            self._end_stranded()
            self._take(FlusherGone(self._line.cut))
        return bool(messages)

    def _hear_flusher_message(self, kind: str, fields: dict[str, Any]) -> None:
        if "step" in fields and fields["attempt"] != self._line.flusher.attempt:
            return  # about a checkpoint of the job before
        match kind:
            case "began":
                self._take(Began(fields["step"], fields["part_chunks"]))
            case "freed":
                self._hear_freed(fields["slots"])
            case "durable":
                body = {"pgt2_seconds": fields["pgt2_seconds"], "file": fields["file"]}
                _log.info("step %d is durable: %s", fields["step"], fields["file"])
                self._line.progressed()
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

    def _hear_freed(self, slots: list[int]) -> None:
        """The journal is the truth: word of what was seen free when a flusher took over may come later, and again."""
        ring, theirs = self._line.flusher.ring, self._session.flusher_slots
        strange = [slot for slot in slots if not 0 <= slot < ring.ring_chunks]
        if strange:
            raise ProtocolError(f"the flusher freed slots {strange}; the ring has {ring.ring_chunks}")
        freed = tuple(slot for slot in slots if slot in theirs and ring.state(slot) is SlotState.FREE)
        if freed:
            self._line.progressed()
            self._take(SlotsFreed(freed))

    def _end_stranded(self) -> None:
        """End what nobody can go on with, before it is called staged: chunks are gone from the ring, with no record."""
        flusher = self._line.flusher
        for known in self._session.known():
            here = sum(flusher.ring.state(slot) is SlotState.FULL for slot in known.slots)
            gone = known.handed_over - here
            if known.staged or not gone or flusher.ring.has_progress(flusher.attempt, known.step):
                continue
            lost = PeerLost(
                f"step {known.step}: the flusher (process {flusher.pid}) ended with {gone} chunks of it in an upload "
                "that no other process can go on with; make the ring larger than the image, or use a store whose "
                "uploads can be resumed"
            )
            self._take(Failed(known.step, lost.code, str(lost)))

    def _mend_line(self) -> None:
        """Take another flusher when there is one: with our ring at once, with a new ring when no credit is out."""
        if self._next_flusher is None:
            found = self._line.find()
            if found is None:
                return
            if found.resumed:
                self._line.take(found)
                self._take(replay(self._line, self._session))
                return
            self._next_flusher = found
            self._do(
                self._session.refuse_all(
                    f"the flusher (process {self._line.flusher.pid}) ended, and its ring could not be kept; what was "
                    "staged and is whole in it is published, the rest is given up"
                )
            )
        if not self._session.outstanding():
            self._start_over(self._next_flusher)
            self._next_flusher = None

    def _start_over(self, flusher: Flusher) -> None:
        """Go on with a flusher that has another ring; nothing is under way into the one before."""
        self._payloads.use(flusher.ring)
        self._line.take(flusher)
        self._attempts.add(flusher.attempt)
        free_slots, flusher_slots = _slot_owners(flusher.ring)
        self._session.reopen(free_slots=free_slots, flusher_slots=flusher_slots)

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
                self._actions.carry_out(action)
            except (HoldfastError, OSError) as error:
                if not isinstance(action, Begin | Staged):
                    raise  # the journal is not what it was: nothing here can be trusted any more
                _log.error("step %d: %s", action.step, error)
                code = error.code if isinstance(error, HoldfastError) else ProtocolError.code
                self._take(Failed(action.step, code, f"stager: {error}"))

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """All trainers are gone: have the flusher make durable what is staged, and wait for it, whichever it is.

        Unless some were lost and the ring is kept: the next attempt is waiting for us to end, and begins from the ring.
        """
        told: Flusher | None = None
        deadline = self._clock() + _DRAIN_SECONDS_MAX
        while told is None or not self._drained:
            is_settled = not (self._line.cut or self._session.may_stage)
            if self.lost_ranks and is_settled and is_kept(self._line.flusher.ring.directory):
                return
            # What is whole and only waits for the flusher's `began` is still to be staged: finish would end it.
            if told is not self._line.flusher and not self._line.cut and not self._session.may_stage:
                told = self._line.flusher
                self._line.send("finish")
            if self._line.failures >= _DRAIN_FAILURES_MAX:
                raise self._drain_failed()
            left_seconds = deadline - self._clock()
            if left_seconds <= 0:
                _log.error(
                    "the flusher (process %d) has not written all within %g s; it goes on by itself",
                    self._line.flusher.pid,
                    _DRAIN_SECONDS_MAX,
                )
                return
            self._line.wait(min(left_seconds, _TICK_SECONDS))
            self._hear_flusher()
            self._mend_line()
            self._take(Tick())
            reap()

    def _drain_failed(self) -> PeerLost:
        flusher, line = self._line.flusher, self._line
        return PeerLost(
            f"{line.failures} flushers in a row ended, or could not be started, before all was durable "
            f"({line.cut or 'the last one has just been started'}); mend what {log_path(self._config.store)} says, "
            f"then start the job, or `holdfast flusher --store {flusher.store_url}`: it publishes what is in "
            f"{flusher.ring.directory}"
        )


def _slot_owners(ring: Ring) -> tuple[list[int], list[int]]:
    """Slots that are free, and slots that the flusher still has to free. Those of no use to a restore come first."""
    flusher_slots = [slot for slot in range(ring.ring_chunks) if ring.state(slot) is not SlotState.FREE]
    held = {record.slot: (record.attempt, record.step) for record in ring.remains()}
    free_slots = set(range(ring.ring_chunks)).difference(flusher_slots)
    return sorted(free_slots, key=lambda slot: (held.get(slot, (0, 0)), slot)), flusher_slots
