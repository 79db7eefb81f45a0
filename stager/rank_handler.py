"""Handles all input from the ranks: messages, payloads, silence, loss.

    HELLO ─► WELCOME, once restore can read every step that earlier jobs have staged
    OFFER, DECLINE, SENT, RETURN, DONE, payloads ─► events of the session        PROPOSE, FITS ─► LayoutRound
    NOTICE, AT ─► Notices      WISH, HERE ─► IntervalHandler      FETCH ─► Fetches      DOUBT ─► DoubtHandler
    PROOF ─► ProofHandler
    BEAT: only proves that the rank is alive
    BYE, dead, broke the protocol ─► the rank has left: each of these parts is told

A rank that sends one invalid message is told why and ignored from then on: its next message cannot be trusted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.config import StagerConfig
from holdfast.errors import HoldfastError, ProtocolError
from holdfast.image.layout import Layout
from holdfast.image.replicas import FIELD
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import Reason
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.layout_round import LayoutRound, OneSidedRound
from holdfast.wire.state_messages import Agreement, Proposal
from holdfast.wire.welcome import Welcome
from stager.actions import Actions
from stager.doubt_handler import DoubtHandler
from stager.fetches import Fetches
from stager.interval_agreement import IntervalHandler
from stager.previous_jobs import PreviousJobs
from stager.proof_handler import ProofHandler
from stager.session.session_messages import (
    Decline,
    Done,
    Event,
    Failed,
    NewLayout,
    Offer,
    RankBack,
    RankLost,
    RankSilent,
    Received,
    Returned,
    Sent,
)
from stager.trainers_port import TrainersPort

_log = logging.getLogger("holdfast.stager")


class RankHandler:
    """Dispatches the ranks' input to the other parts of the stager. Only for the loop's thread."""

    def __init__(
        self,
        config: StagerConfig,
        port: TrainersPort,
        actions: Actions,
        doubts: DoubtHandler,
        proofs: ProofHandler,
        previous_jobs: PreviousJobs,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        trainers, line, events = actions.trainers, actions.line, actions.events
        self._config, self._port, self._trainers, self._line = config, port, trainers, line
        self._payloads, self._notices, self._actions = actions.payloads, actions.notices, actions
        self._events, self._clock = events, clock
        self._round = LayoutRound(port.ranks, config.offer_seconds_max)
        self._interval = IntervalHandler(trainers, events, attempt=lambda: line.flusher.attempt, clock=clock)
        self._doubts, self._proofs = doubts, proofs
        self._fetches = Fetches(port, line)
        self._previous_jobs = previous_jobs
        self._awaiting_welcome: set[int] = set()

    @property
    def streaming(self) -> bool:
        """Whether bytes are in flight that move only while the port is polled."""
        return self._payloads.arriving or self._fetches.busy or self._port.unsent

    def poll(self) -> bool:
        """Handle all input that has arrived; return whether there was any."""
        result = self._port.poll()
        for rank, message in result.messages:
            if rank in self._trainers.present:
                self._handle_message(rank, message)
        for rank, reason in result.lost:
            self._remove_rank(rank, f"{reason} ({self._trainers.name(rank)})", lost=True)
        received = self._poll_payloads()
        answered = self._fetches.answer()
        return bool(result.messages or result.lost or received or answered)

    def tick(self, now: float) -> None:
        """Check deadlines, welcome ranks that may restore, and find silent ranks."""
        self._notices.tick()
        self._interval.tick()
        if late := self._round.late_warning(now):
            _log.warning("%s", late)
        self._send_round_result(self._round.expire(now))
        self._welcome_ranks()
        self._send_beats()

    def _poll_payloads(self) -> bool:
        arrivals = self._payloads.poll()
        for rank, step, chunk, nbytes, expected_bytes in arrivals:
            if nbytes == expected_bytes:
                self._process(rank, Received(rank, step, chunk))
                continue
            what = f"step {step}, chunk {chunk}: payload of {nbytes} bytes, expected {expected_bytes}"
            self._drop_rank(rank, ProtocolError(f"rank {rank}: {what}"))
        return bool(arrivals)

    def _process(self, rank: int, event: Event) -> None:
        """Pass an event to the session; drop the rank if the event breaks the protocol."""
        self._actions.process(event, lambda error: self._drop_rank(rank, error))

    # -- messages ------------------------------------------------------------------------------------------------

    def _handle_message(self, rank: int, message: bytes) -> None:
        silence = self._trainers.note_message(rank)
        if silence is not None:
            name = self._trainers.name(rank)
            _log.warning("%s is heard again after %.0f s; checkpoints resume", name, silence.seconds)
            self._events.emit("rank_back", {"silent_rank": rank, "name": name, "seconds": silence.seconds})
            self._actions.process(RankBack(rank))
        try:
            frame = wire.decode(message)
            if not frame.kind.to_stager:
                raise ProtocolError(f"{frame.kind.name} is not a message that a trainer may send")
            if frame.kind not in {Kind.HELLO, Kind.BYE} and frame.attempt not in self._line.attempts:
                raise ProtocolError(
                    f"{frame.kind.name} of attempt {frame.attempt}, this job is attempt {self._line.flusher.attempt}"
                )
            if frame.kind in {Kind.NOTICE, Kind.AT}:
                self._notices.handle(rank, frame)
            elif frame.kind in {Kind.WISH, Kind.HERE}:
                self._interval.handle(rank, frame)
            elif frame.kind is Kind.DOUBT:
                self._doubts.handle(rank, frame)
            elif frame.kind is Kind.PROOF:
                self._proofs.handle(rank, frame)
            elif frame.kind is Kind.FETCH:
                self._fetches.handle(rank, frame)
            elif frame.kind is not Kind.BEAT:  # `note_message` above has noted the beat
                self._handle_frame(rank, frame)
        except ProtocolError as error:
            self._drop_rank(rank, error)

    def _handle_frame(self, rank: int, frame: Frame) -> None:
        match frame.kind:
            case Kind.HELLO:
                self._trainers.handle_hello(rank, frame)
                self._awaiting_welcome.add(rank)
                self._welcome_ranks()
            case Kind.PROPOSE:
                self._send_round_result(self._round.propose(rank, self._proposal(rank, frame), self._clock()))
            case Kind.LAYOUT:
                self._process(rank, NewLayout(self._layout(rank, frame)))
            case Kind.OFFER:
                body = wire.json_body(frame, layout_digest=str)
                self._actions.on_offered(frame.step)
                self._trainers.set_step(rank, frame.step)
                self._notices.on_offered(frame.step)
                self._process(
                    rank, Offer(rank, frame.step, body.pop("layout_digest"), SaveRecord.from_json(body))
                )
                self._send_round_result(self._round.record_fits(rank, frame.step))
            case Kind.FITS:
                self._send_round_result(self._round.record_fits(rank, frame.step))
            case Kind.DECLINE:
                reason = Reason.from_decline(frame.body.decode(errors="replace")[:2000])
                self._trainers.set_step(rank, frame.step)
                self._notices.on_offered(frame.step)
                self._process(rank, Decline(rank, frame.step, reason, frame.arg))
            case Kind.SENT:
                self._process(rank, Sent(rank, frame.step, frame.chunk, frame.arg, frame.flags))
                self._payloads.on_sent(rank, frame.step, frame.chunk)
            case Kind.RETURN:
                self._process(rank, Returned(rank, frame.step, frame.chunk))
            case Kind.DONE:
                body = wire.json_body(frame)
                fingerprints = body.pop(FIELD, None)
                self._process(rank, Done(rank, frame.step, SaveRecord.from_json(body), fingerprints))
            case Kind.ALL_STAGED:
                self._handle_all_staged(rank, frame.step)
            case Kind.BYE:
                self._remove_rank(rank, f"rank {rank} has left", lost=False)

    def _handle_all_staged(self, rank: int, step: int) -> None:
        if rank != 0:
            raise ProtocolError(f"ALL_STAGED from rank {rank}; only rank 0 says so")
        self._actions.on_all_staged(step)

    # -- ranks that join, fall silent, and leave -------------------------------------------------------------------

    def _welcome_ranks(self) -> None:
        """Welcome the ranks that have joined, once restore can read every step that earlier jobs staged."""
        flusher = self._line.flusher
        if not self._awaiting_welcome:
            return
        for rank in self._awaiting_welcome:
            self._trainers.note_message(rank)  # before WELCOME a rank answers no beats
        if self._previous_jobs.may_restore(flusher.ring, flusher.attempt):
            for rank in self._awaiting_welcome & self._trainers.present:
                self._trainers.welcome(rank, self._welcome().to_frame())
            self._awaiting_welcome.clear()

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
            share=self._config.share.index + 1,
            shares=self._config.share.writers,
            ring=flusher.ring.identity,
            seen=flusher.prior_failures,
        )

    def _send_beats(self) -> None:
        """Send heartbeats to the ranks, and find the silent ones."""
        for rank, seconds in self._trainers.send_beats(self._line.flusher.attempt):
            name = self._trainers.name(rank)
            _log.error(
                "%s has been silent for %.0f s: its process is stopped, cut off, or gone; the steps that it had not "
                "sent are given up, and no checkpoint is taken until it is heard again",
                name,
                seconds,
            )
            self._events.emit("rank_silent", {"silent_rank": rank, "name": name, "seconds": seconds})
            self._actions.process(RankSilent(rank, name, seconds))
            self._interval.on_rank_silent(f"{name} has been silent")

    def _drop_rank(self, rank: int, error: ProtocolError) -> None:
        """Tell the rank why, and drop it."""
        _log.error("rank %d broke the protocol and is dropped: %s", rank, error)
        self._trainers.send(rank, self._refusal(error))
        self._remove_rank(rank, f"rank {rank} broke the protocol: {error}", lost=True)

    def _remove_rank(self, rank: int, reason: str, *, lost: bool) -> None:
        if rank not in self._trainers.present:
            return
        self._trainers.remove(rank, lost=lost)
        self._port.mark_left(rank)
        self._fetches.drop_requests(rank)
        if lost:
            _log.error("%s; the steps that it had not sent are given up, the other ranks continue", reason)
            self._events.emit("rank_lost", {"lost_rank": rank, "reason": reason})
        self._notices.on_rank_left(
            rank, reason
        )  # first: otherwise it would retry the steps that the session fails now
        self._interval.on_rank_left(reason, lost=lost)
        self._actions.process(RankLost(rank, reason))
        self._send_round_result(self._round.record_lost(rank, reason, has_exited=not lost))

    def _send_round_result(self, answer: Agreement | HoldfastError | OneSidedRound | None) -> None:
        """Tell every rank how a round of proposals ended, if it did."""
        if answer is None:
            return
        if isinstance(answer, OneSidedRound):
            self._fail_one_sided(answer)
            return
        if isinstance(answer, Agreement):
            self._trainers.send_all(answer.to_frame(self._line.flusher.attempt))
        else:
            self._trainers.send_all(self._refusal(answer))

    def _refusal(self, error: HoldfastError) -> bytes:
        return wire.encode(Kind.REFUSED, attempt=self._line.flusher.attempt, body=wire.error_body(error))

    def _layout(self, rank: int, frame: Frame) -> Layout:
        if rank != 0:
            raise ProtocolError(f"LAYOUT from rank {rank}; only rank 0 announces layouts")
        layout, ring_chunk_bytes = Layout.from_bytes(frame.body), self._line.flusher.ring.chunk_bytes
        if layout.chunk_bytes != ring_chunk_bytes:
            raise ProtocolError(
                f"LAYOUT with chunks of {layout.chunk_bytes} bytes, the ring has {ring_chunk_bytes}"
            )
        return layout

    def _fail_one_sided(self, ended: OneSidedRound) -> None:
        """Refuse the ranks that proposed; fail the step for the others, which have begun it."""
        _log.error("%s", ended.error)
        for rank in ended.ranks:
            self._trainers.send(rank, self._refusal(ended.error))
        self._actions.process(Failed(ended.step, ended.error.code, str(ended.error)))

    def _proposal(self, rank: int, frame: Frame) -> Proposal:
        """The rank's proposal; an unreadable one becomes a refusal for all ranks, and the session continues."""
        try:
            return self._round.read(frame)
        except ProtocolError as error:
            _log.error("rank %d: its proposal is refused: %s", rank, error)
            return Proposal.refused(error)
