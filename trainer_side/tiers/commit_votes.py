"""The commit votes: how the training ranks agree on what their local tiers hold, without a stager. Rank 0 decides.

    writer threads    vote_sealed ───┐                                      ┌─► on_verdict: tier.complete, tier.void
    training thread   agree, … ──────┼► outbox ═► rank 0: Rank0Votes ═► Voter ─► the answer to `agree`, `confirm_ready`
    watch             send_notice ───┘                                      └─► agreed_steps: a step all ranks save

One thread per rank carries the messages; on rank 0 it also decides. No collective operation, no wait without a
deadline, no spinning: a thread with nothing to do looks every 10 ms.

If rank 0 is silent, nothing is decided. A slice without a verdict is then kept and never called void, because rank 0
may have told other ranks that it is complete. From then on local tiers take nothing new, and the log says so once.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.notices.messages import Announcement
from holdfast.notices.notice import Notice
from holdfast.telemetry.causes import Reason
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Frame, Kind, decode, peer_error
from holdfast.wire.layout_round import pickle_reserve_bytes
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.background_thread import BackgroundThread, thread_died
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.ranks.ports import CouncilPort
from trainer_side.tiers.rank0_votes import ROOT, Rank0Votes, VoteLimits, fingerprints_frame
from trainer_side.tiers.tier import Order, StepVerdict, reason_body
from trainer_side.tiers.tier_set import RankCouncil

_log = logging.getLogger("holdfast.trainer.council")

_SLACK_SECONDS = 10.0  # for an answer that itself has a deadline at rank 0
_PAUSE_SECONDS = 10e-3
_AWAITING_PAUSE_SECONDS = 1e-3
_FLUSH_SECONDS_MAX = 10.0
_TASK = "agrees with the other ranks on what local tiers hold"


# The answer to a pending `agree` or `confirm_ready`; None: all ranks are ready.
PendingQuestion = Future[Agreement | None]


class Voter:
    """A rank's part: handles rank 0's messages, and knows which answers the rank still expects. Has no thread.

    The thread of `CommitVotes` calls `handle`, `check_silence` and `end`, and in it `on_verdict` and `on_doubt` are
    called; other methods belong to any thread. `agreed_steps` are those of a job without a stager. A sealed slice waits
    for its verdict for `silence_seconds_max`.
    """

    def __init__(
        self,
        rank: int,
        on_verdict: Callable[[StepVerdict], None],
        agreed_steps: AgreedSteps | None,
        *,
        silence_seconds_max: float,
    ) -> None:
        self._rank, self._on_verdict, self._agreed_steps = rank, on_verdict, agreed_steps
        self._silence_seconds_max = silence_seconds_max
        self.new_pickle_reserve_bytes = 0  # as in `RankCouncil`
        self.on_doubt: Callable[[Doubt], None] = lambda _: None
        self._undecided: dict[tuple[int, Order], float] = {}  # slices that this rank has sealed, and when
        self._question: PendingQuestion | None = None

    @property
    def undecided(self) -> int:
        """Number of slices that this rank has sealed and that have no verdict."""
        return len(self._undecided)

    @property
    def has_question(self) -> bool:
        return self._question is not None

    def expect_verdict(self, tier: int, order: Order, now: float) -> None:
        """Expect a verdict on a slice of this rank."""
        self._undecided[tier, order] = now

    def start_question(self) -> PendingQuestion:
        """Expect an answer. The new question replaces a pending one."""
        self._question = Future()
        return self._question

    def handle(self, frame: Frame) -> bytes | None:
        """Handle a message of rank 0 and return the reply, if any. ProtocolError: rank 0 may not send it."""
        match frame.kind:
            case Kind.COMPLETE | Kind.VOID:
                verdict = StepVerdict.from_frame(frame)
                self._on_verdict(verdict)
                self._undecided.pop((verdict.tier, verdict.order), None)
            case Kind.RESERVED:
                self._answer(Agreement.from_frame(frame))
            case Kind.GO:
                self._answer(None)
            case Kind.REFUSED:
                body = wire.json_body(frame, code=str, message=str)
                if not self._answer(peer_error(body["code"], body["message"])):
                    # Only other ranks asked, so training continues here.
                    _log.error("rank %d: other ranks cannot save: %s", self._rank, body["message"])
            case Kind.ROOM:
                self.new_pickle_reserve_bytes = max(self.new_pickle_reserve_bytes, frame.arg)
            case Kind.DOUBTED:
                self.on_doubt(Doubt.from_frame(frame))
            case Kind.SAVE_AT if self._agreed_steps is not None:
                return self._handle_save_at(frame, self._agreed_steps)
            case _:
                raise ProtocolError(f"rank {self._rank}: rank 0 sent {frame.kind.name}, which it must not")
        return None

    def check_silence(self, now: float) -> None:
        """Raise PeerLost if a slice that was sealed long ago has no verdict: rank 0 no longer decides."""
        if not self._undecided:
            return
        waited = now - min(self._undecided.values())
        if waited > self._silence_seconds_max:
            raise PeerLost(
                f"rank {self._rank} has had no verdict from rank 0 on a slice that it sealed {waited:.0f} s ago"
            )

    def end(self, error: HoldfastError | None = None) -> None:
        """Expect nothing more from rank 0. An error answers a pending question."""
        if error is not None:
            self._answer(error)
        if self._agreed_steps is not None:
            self._agreed_steps.end()

    def _answer(self, answer: Agreement | HoldfastError | None) -> bool:
        """Answer a pending question; return whether there was one."""
        question, self._question = self._question, None
        if question is None:
            return False
        if isinstance(answer, HoldfastError):
            question.set_exception(answer)
        else:
            question.set_result(answer)
        return True

    def _handle_save_at(self, frame: Frame, agreed_steps: AgreedSteps) -> bytes | None:
        try:
            answer = agreed_steps.handle(Announcement.from_frame(frame))
        except ProtocolError as error:
            _log.error("rank %d: ignores a step to save after a notice: %s", self._rank, error)
            agreed_steps.end()  # otherwise training would wait at a step that this rank has promised
            return None
        return None if answer is None else answer.to_frame(Kind.AT, attempt=frame.attempt)


class CommitVotes(RankCouncil):
    """One rank's votes on slices, its questions to the other ranks, and the thread that carries both. Any thread.

    The thread of the votes calls `on_verdict` with every verdict, and `on_poll` repeatedly, even after rank 0 has
    stopped deciding. `agreed_steps`: The step at which this rank acts on a notice; only in a job without a stager.
    `rank0`: Decides, on rank 0; if None there, neither preemption nor replicas are handled.
    """

    def __init__(
        self,
        port: CouncilPort,
        limits: VoteLimits,
        *,
        on_verdict: Callable[[StepVerdict], None],
        on_poll: Callable[[], None] = lambda: None,
        agreed_steps: AgreedSteps | None = None,
        rank0: Rank0Votes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._rank, self._on_poll, self._clock = port, port.rank, on_poll, clock
        self._answer_seconds_max = limits.agree_seconds_max + _SLACK_SECONDS
        silence_seconds_max = 2 * limits.seal_seconds_max + _SLACK_SECONDS
        self._voter = Voter(port.rank, on_verdict, agreed_steps, silence_seconds_max=silence_seconds_max)
        if rank0 is None and port.rank == ROOT:
            rank0 = Rank0Votes(port.ranks, limits)
        self._rank0 = rank0
        self.problem: HoldfastError | None = None  # why no more decisions are made
        self._outbox: deque[bytes] = deque()
        self._wake = threading.Event()
        self._lost: frozenset[int] = frozenset()
        self._bye_sent = False
        self._leave_deadline: float | None = None
        self._thread = BackgroundThread(
            "holdfast-council", self._run, rank=port.rank, task=_TASK, on_death=self._give_up
        )
        self._thread.start()

    @property
    def undecided(self) -> int:
        return self._voter.undecided

    @property
    def new_pickle_reserve_bytes(self) -> int:
        return self._voter.new_pickle_reserve_bytes

    # -- this rank's messages -------------------------------------------------------------------------------------

    def vote_sealed(self, tier: int, order: Order, layout: str) -> None:
        """Vote for a step: this rank has sealed its slice in this tier. Called once for each slice."""
        self._voter.expect_verdict(tier, order, self._clock())
        self._vote(Kind.SEALED, tier, order, wire.encode_text(layout))

    def vote_skipped(self, tier: int, order: Order, why: Reason) -> None:
        """Vote against a step: this rank will never seal its slice in this tier."""
        self._vote(Kind.SKIPPED, tier, order, reason_body(why))

    def compare(self, order: Order, layout_digest: str, fingerprints: str) -> None:
        """Ask rank 0 to compare this rank's replicas with the other ranks'. Precedes `vote_sealed` of the step."""
        self._send_root(fingerprints_frame(order, layout_digest, fingerprints))

    def limit_wait(self, seconds_max: float) -> None:
        self._answer_seconds_max = min(self._answer_seconds_max, seconds_max)

    def agree(self, proposal: Proposal) -> Agreement:
        answer = self._ask(proposal.to_frame(0), "compare the layouts of all ranks")
        assert answer is not None
        return answer

    def confirm_ready(self, error: HoldfastError | None) -> None:
        body = wire.to_json({}) if error is None else wire.error_body(error)
        try:
            self._ask(wire.encode(Kind.READY, body=body), "hear whether all ranks are ready")
        except HoldfastError as refused:
            raise error or refused from None
        assert error is None

    def send_fits(self, step: int) -> None:
        if self.problem is None:
            self._send_root(wire.encode(Kind.FITS, step=step))

    def announce_room(self, needed_bytes: int) -> None:
        assert self._rank == ROOT
        self._send_root(wire.encode(Kind.ROOM, arg=pickle_reserve_bytes(needed_bytes)))

    def send_doubt(self, doubt: Doubt) -> None:
        if self.problem is None:
            self._send_root(doubt.to_frame(Kind.DOUBT, attempt=0))

    def set_doubt_callback(self, call: Callable[[Doubt], None]) -> None:
        self._voter.on_doubt = call

    def send_notice(self, notice: Notice) -> None:
        if self.problem is not None:
            why = (
                f"{notice.sentence()}; the ranks no longer agree on anything, so no extra checkpoint is taken"
            )
            _log.error("rank %d: %s", self._rank, why)
            return
        who = f"rank {self._rank} on host {platform.node()} (process {os.getpid()})"
        body = wire.to_json({**notice.to_json(), "who": who})
        self._send_root(wire.encode(Kind.NOTICE, body=body))

    def close(self, seconds_max: float) -> None:
        """Wait for the pending verdicts and for the other ranks, then end the thread. Safe to call twice."""
        if self._leave_deadline is None:
            self._leave_deadline = self._clock() + seconds_max
        self._wake.set()
        self._thread.join(seconds_max + _FLUSH_SECONDS_MAX)

    def _vote(self, kind: Kind, tier: int, order: Order, body: bytes) -> None:
        attempt, step = order
        self._send_root(wire.encode(kind, attempt=attempt, step=step, arg=tier, body=body))

    def _ask(self, message: bytes, what: str) -> Agreement | None:
        question = self._voter.start_question()
        if self.problem is not None:  # read after `start_question`: a later problem answers the question
            raise self.problem
        self._send_root(message)
        limit = self._answer_seconds_max
        try:
            return question.result(limit)
        except TimeoutError:
            raise PeerLost(f"rank {self._rank} waited {limit:g} s for rank 0 to {what}") from None

    def _send_root(self, message: bytes) -> None:
        self._outbox.append(message)
        self._wake.set()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._may_leave():
            try:
                self._on_poll()
                busy = self._poll()
            except HoldfastError as error:
                self._give_up(error)
                busy = False
            except Exception as error:  # noqa: BLE001 - a bug here must not end the tiers' other threads
                self._give_up(thread_died(error, rank=self._rank, name=self._thread.name, task=_TASK))
                busy = False
            if not busy:
                awaiting = self._voter.has_question or self._leave_deadline is not None
                self._wake.wait(_AWAITING_PAUSE_SECONDS if awaiting else _PAUSE_SECONDS)
                self._wake.clear()
        self._voter.end()
        if self.problem is None:
            self._port.flush(_FLUSH_SECONDS_MAX)

    def _poll(self) -> bool:
        if self.problem is not None:
            self._outbox.clear()
            return False
        busy = bool(self._outbox)
        while self._outbox:
            message = self._outbox.popleft()
            if self._rank0 is not None:
                self._handle_message(ROOT, message)
            else:
                self._port.send(ROOT, message)
        for rank, message in self._port.poll():
            busy = True
            self._handle_message(rank, message)
        self._handle_deaths()
        if self._rank0 is not None:
            self._broadcast(self._rank0.tick(self._clock()))
        else:
            self._voter.check_silence(self._clock())
        return busy

    def _handle_message(self, rank: int, message: bytes) -> None:
        try:
            frame = decode(message)
        except ProtocolError as error:
            raise ProtocolError(f"rank {rank}: {error}") from error
        if self._rank0 is not None:
            self._broadcast(self._rank0.handle(rank, frame, self._clock()))
        elif rank == ROOT:
            self._handle_root_message(frame)
        else:
            raise ProtocolError(
                f"rank {rank} sent {frame.kind.name} to rank {self._rank}; only rank 0 may send to other ranks"
            )

    def _broadcast(self, messages: list[bytes]) -> None:
        for message in messages:
            for rank in range(self._port.ranks):
                if rank != ROOT and rank not in self._lost:
                    self._port.send(rank, message)
            self._handle_root_message(decode(message))

    def _handle_root_message(self, frame: Frame) -> None:
        if (reply := self._voter.handle(frame)) is not None:
            self._send_root(reply)

    def _handle_deaths(self) -> None:
        lost = self._port.lost_ranks()
        if lost == self._lost:
            return
        new, self._lost = lost - self._lost, lost
        if self._rank0 is not None:
            for rank in sorted(new):
                self._broadcast(self._rank0.rank_died(rank))
        elif ROOT in new and self._leave_deadline is None:
            raise PeerLost("rank 0 of the training ranks is dead")

    def _give_up(self, error: HoldfastError) -> None:
        if self.problem is not None:
            return
        _log.error(
            "rank %d: local tiers take nothing new in this job; every step that is complete in them stays: %s",
            self._rank,
            error,
        )
        self.problem = error  # set after logging, so that a thread that sees the problem finds the log line
        self._voter.end(error)

    def _may_leave(self) -> bool:
        """Whether this rank and the others no longer wait for each other."""
        if self._leave_deadline is None:
            return False
        if self.problem is not None or self._clock() > self._leave_deadline:
            return True
        if not self._bye_sent:
            self._bye_sent = True
            self._send_root(wire.encode(Kind.BYE))  # after every vote
        if self._outbox or self._voter.undecided:
            return False
        return self._rank0 is None or self._rank0.all_left
