"""The link to the stager: the one thread of a training rank that talks MPI after start-up.

    training thread      agree, announce, offer, decline, close ──► commands ─┐
    copy thread          SliceSource.is_ready(frame) ─────────────────────────┤
                                                                              ▼
    this thread          commands · control messages · send what is credited and copied · deadlines · rest

`Outgoing` holds what is sent for one checkpoint, `Verdicts` what was said of steps that are not offered yet. What goes
wrong with the stager never stops the training: it becomes `problem`, said once and loudly, and every later offer is
declined at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast import wire
from holdfast.config import TrainerConfig
from holdfast.emergency import Word
from holdfast.errors import ConfigError, HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.events import EventLog
from holdfast.faultpoint import identify
from holdfast.layout import Layout
from holdfast.notice import Notice
from holdfast.pace import Wish
from holdfast.remains import Asked
from holdfast.wire import Agreement, Frame, Kind, Proposal, Welcome, peer_error
from trainer_side.notice.appointments import Appointments
from trainer_side.outgoing import Outgoing, Plan, StagerPort
from trainer_side.pace.hearing import hear_pace
from trainer_side.pace.schedule import Schedule
from trainer_side.transfer import SliceSource, Transfer, TransferState
from trainer_side.verdicts import Silence, Verdicts

if TYPE_CHECKING:
    from trainer_side.mpi import MpiPeers

__all__ = ["Agreement", "Link", "Proposal", "SliceSource", "Transfer", "TransferState", "Welcome"]

_log = logging.getLogger("holdfast.trainer.link")

_PAUSE_SECONDS_MIN = (
    0.2e-3  # the stager takes ten times as long for a payload, and each look costs what training could use
)
_SENDING_PAUSE_SECONDS_MAX = 0.5e-3
_STAGED_PAUSE_SECONDS_MAX = 2e-3  # what is left of it is the stager's word that it is durable
_IDLE_PAUSE_SECONDS_MAX = 10e-3  # an offer wakes the thread at once; only the stager's news wait so long
_STREAMING_SECONDS = 0.02  # what goes over a network, or in many pieces, moves only while both sides poll
_AWAITING_PAUSE_SECONDS = 1e-3  # at start-up
_LEAVE_SECONDS_MAX = 5.0
_EXIT_SECONDS_MAX = 10.0
_FETCH_SECONDS_MAX = 30.0  # other ranks wait for the answer, too
_SLACK_SECONDS = 10.0  # for an answer that itself has a deadline at the stager


@dataclass(eq=False)
class _Question:
    """An open `agree`."""

    answered: threading.Event = field(default_factory=threading.Event)
    answer: Agreement | HoldfastError | None = None


@dataclass(eq=False)
class _Fetch:
    """An open `fetch`. `answer` stays None if the stager has gone."""

    asked: Asked
    answered: threading.Event = field(default_factory=threading.Event)
    answer: Frame | None = None


class Link:
    """See the module. Made by `join`; its methods belong to the training thread unless they say otherwise.

    Attributes:
        rank: This training rank. `ranks`: how many there are.
        welcome: What the stager said at start-up.
        peers: The other ranks, for restore.
        events: Event log; may be replaced before the first offer.
        problem: Why no checkpoint can be taken any more; None while all is well. Any thread.
        appointments: At which step this rank acts on a notice.
        schedule: At which steps it saves, with `every="auto"`.
        staged_step: Newest step that is staged; -1 before the first. `durable_step`: that is durable. Any thread.
        goes_on_in: Local tiers in which checkpoints go on without a stager; empty where there are none.
        new_pickle_reserve_bytes: Room that rank 0's pickle was given after it had outgrown its reserve; 0 before.
    """

    def __init__(
        self,
        config: TrainerConfig,
        port: StagerPort,
        welcome: Welcome,
        *,
        rank: int,
        ranks: int,
        peers: MpiPeers | None = None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._port, self._clock = config, port, clock
        self.welcome, self.rank, self.ranks = welcome, rank, ranks
        self._peers = peers
        self.events = events or EventLog(None, role="trainer", rank=rank)
        self.problem: HoldfastError | None = None
        self.appointments = Appointments(wait_seconds_max=config.stager_seconds_max)
        self.schedule = Schedule(auto=False, wait_seconds_max=config.stager_seconds_max)
        self.staged_step = self.durable_step = -1
        self.goes_on_in = ""
        self.new_pickle_reserve_bytes = 0
        self._plan: Plan | None = None
        self._newest_step = -1
        self._accepted: list[Transfer] = []  # by the training thread, for close()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._active: OrderedDict[int, Outgoing] = OrderedDict()
        self._verdicts = Verdicts()
        self._silence = Silence(rank, max(config.stager_seconds_max, 2 * welcome.beat_seconds), clock)
        self._question: _Question | None = None
        self._fetches: deque[_Fetch] = deque()  # asked and not answered, in this order
        self._leaving = False
        self._closed = False
        self._active_at = clock()
        self._thread = threading.Thread(target=self._run, name="holdfast-link", daemon=True)
        self._thread.start()

    @classmethod
    def join(cls, config: TrainerConfig, events: EventLog | None = None) -> Link:
        """Meet the other ranks and the stager. Collective; main thread; at most `start_seconds_max`.

        Raises:
            ConfigError: There is no stager in this job, or more than one.
            PeerLost: Somebody did not come, or did not answer.
            HoldfastError: The stager could not start; its error, of its class.
        """
        from trainer_side.mpi import World  # starts MPI: not when somebody only imports this package

        world = World.join(config.start_seconds_max)
        identify(f"rank:{world.rank}")
        port = world.port()
        port.send(
            wire.encode(
                Kind.HELLO,
                body=wire.to_json({"version": wire.VERSION, "pid": os.getpid(), "host": platform.node()}),
            )
        )
        deadline = time.monotonic() + config.start_seconds_max
        try:
            welcome = _await_welcome(port, deadline, config.start_seconds_max)
            if welcome.ranks != world.ranks:
                raise ProtocolError(f"the stager sees {welcome.ranks} trainers, MPI {world.ranks}")
        except HoldfastError:
            port.leave(_LEAVE_SECONDS_MAX)
            raise
        link = cls(
            config, port, welcome, rank=world.rank, ranks=world.ranks, peers=world.peers(), events=events
        )
        # A script that ends without close() must not leave the stager waiting for this rank.
        atexit.register(link._at_exit)
        return link

    @property
    def store_url(self) -> str:
        """URL of the run."""
        return self.welcome.store_url

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk."""
        return self.welcome.chunk_bytes

    @property
    def peers(self) -> MpiPeers:
        """The other ranks; before the first step only."""
        if self._peers is None:
            raise ConfigError("this link was made without peers")
        return self._peers

    # -- what the training thread asks for -----------------------------------------------------------------------

    def agree(self, proposal: Proposal) -> Agreement:
        """Compare this rank's tensors with those of the others. Collective; waits for the slowest rank.

        Raises:
            StateError: The ranks hold different tensors: which rank, which tensor, expected, got.
            PeerLost: A rank or the stager did not answer in time.
        """
        if self.problem is not None:
            raise self.problem
        question = _Question()
        message = proposal.to_frame(self.welcome.attempt)

        def ask() -> None:
            self._question = question
            self._port.send(message)

        self._command(ask)
        seconds_max = max(self._config.start_seconds_max, self.welcome.offer_seconds_max + _SLACK_SECONDS)
        if not question.answered.wait(seconds_max):
            raise PeerLost(
                f"rank {self.rank} waited {seconds_max:g} s for the stager to compare the layouts of all ranks"
            )
        if not isinstance(question.answer, Agreement):
            assert question.answer is not None
            raise question.answer
        return question.answer

    def fetch(
        self, asked: Asked, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        """Ask the stager for what its ring still has of earlier checkpoints. Any thread; several may ask at once.

        Args:
            asked: What for.
            attempt: Of the checkpoint.
            step: Its step.
            chunk: Which of its chunks.
            body: The rest of the question, as docs/wire.md says.

        Returns:
            The answer; None if it is not there.

        Raises:
            PeerLost: The stager is gone, or has not answered within `stager_seconds_max`, or 30 s if that is less.
            ProtocolError: It answered something else.
        """
        fetch = _Fetch(asked)
        message = wire.encode(
            Kind.FETCH,
            attempt=self.welcome.attempt,
            step=step,
            chunk=chunk,
            flags=asked,
            arg=attempt,
            body=body,
        )

        def ask() -> None:
            if self.problem is not None:
                fetch.answered.set()
            else:
                self._fetches.append(fetch)
                self._port.send(message)

        self._command(ask)
        seconds_max = min(self._config.stager_seconds_max, _FETCH_SECONDS_MAX)
        in_time = fetch.answered.wait(seconds_max)
        if fetch.answer is None:
            why = self.problem if in_time else f"no answer within {seconds_max:g} s"
            raise PeerLost(f"rank {self.rank} asked for what the stager's ring has: {why}")
        frame = fetch.answer
        if (frame.flags, frame.step, frame.chunk) != (asked, step, chunk):
            raise ProtocolError(
                f"rank {self.rank} asked for {asked.name} of step {step}, chunk {chunk}; the stager answered "
                f"{frame.flags} of step {frame.step}, chunk {frame.chunk}"
            )
        return frame.body if frame.arg else None

    def announce(self, layout: Layout) -> None:
        """Use `layout` for all later offers. Every rank calls it with the same one; rank 0 sends it to the stager."""
        self._plan = Plan.of(layout, self.rank)
        if self.rank == 0 and self.problem is None:
            message = wire.encode(Kind.LAYOUT, attempt=self.welcome.attempt, body=layout.to_bytes())
            self._command(lambda: self._port.send(message))

    def offer(self, step: int, source: SliceSource, record: dict[str, Any]) -> Transfer:
        """Offer the checkpoint of `step`; returns at once. `source` must stay as it is until the transfer is released.

        Args:
            step: Higher than every step before, else it is declined here.
            source: This rank's bytes.
            record: What is known so far, `saved_at_unix` among it; the link adds its times.

        Raises:
            StateError: No layout was announced.
        """
        plan = self._plan
        if plan is None:
            raise StateError(f"rank {self.rank}: step {step} is offered before a layout was announced")
        transfer = Transfer(step, record)
        refusal = str(self.problem) if self.problem is not None else ""
        if not refusal and step <= self._newest_step:
            # By the same rule on each rank, so that all leave it out.
            refusal = f"not new: step {step} is not above step {self._newest_step}, which was saved or declined before"
        if refusal:
            code = self.problem.code if self.problem is not None else ""
            transfer.reach(TransferState.DECLINED, refusal, code)
            transfer.released.set()
            return transfer
        self._newest_step = step
        self._accepted = [other for other in self._accepted if not other.ended.is_set()] + [transfer]
        self._command(lambda: self._begin(Outgoing(transfer, source, plan)))
        return transfer

    def answer(self, step: int) -> tuple[str, str] | None:
        """Why `step`, which this rank has not offered yet, is not taken, and the code of the stager's error, if it gave
        one; None as far as is known. Any thread.
        """
        verdict = self._verdicts.of(step)
        if verdict is None:
            return None
        body = wire.json_body(verdict)
        return str(body.get("reason") or body.get("message") or ""), str(body.get("code", ""))

    def decline(self, step: int, reason: str, *, needed_pickle_bytes: int = 0) -> None:
        """Tell the stager, and through it all ranks, that this rank takes no checkpoint of `step`. Any thread.

        Args:
            step: A new step, or one that was offered and cannot go on.
            reason: Why: a word or two for the cause, a colon, a sentence. The causes are counted.
            needed_pickle_bytes: Above 0: the pickle has outgrown its reserve; rank 0 only.
        """
        self._newest_step = max(self._newest_step, step)
        message = wire.encode(
            Kind.DECLINE,
            attempt=self.welcome.attempt,
            step=step,
            arg=needed_pickle_bytes,
            body=reason.encode()[:2000],
        )

        def tell() -> None:
            active = self._active.get(step)
            if active is None and self._verdicts.of(step) is not None:
                return  # declined by somebody else already
            if active is not None and active.transfer.state.final:
                return
            self._port.send(message)
            if active is not None:
                self._end(active, TransferState.DECLINED, f"rank {self.rank}: {reason}")

        if self.problem is None:
            self._command(tell)

    def notice(self, notice: Notice) -> None:
        """Tell the stager that this rank's machine will be taken away. Any thread."""

        def tell() -> None:
            body = wire.to_json(notice.to_json())
            self._port.send(wire.encode(Kind.NOTICE, attempt=self.welcome.attempt, body=body))

        if self.problem is None:
            self._command(tell)
        else:
            _log.error(
                "rank %d: %s; without the stager nobody brings the ranks to one step",
                self.rank,
                notice.sentence(),
            )

    def wish(self, wish: Wish) -> None:
        """Ask the stager to bring all ranks to another interval; rank 0 only. Any thread."""
        message = wire.encode(Kind.WISH, attempt=self.welcome.attempt, body=wire.to_json(wish.to_json()))
        self._command(lambda: self._port.send(message) if self.problem is None else None)

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """Wait until what was offered is durable (or staged), say good-bye, end the thread. Safe to call twice.

        Args:
            wait_for: `DURABLE`, or `STAGED` to leave the rest to the flusher.
            seconds_max: How long to wait; what is not there then is logged, not lost.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        deadline = self._clock() + seconds_max
        for transfer in self._accepted:
            event = transfer.ended if wait_for is TransferState.DURABLE else transfer.settled
            if not event.wait(max(0.0, deadline - self._clock())) and self.problem is None:
                _log.error(
                    "rank %d: step %d is %s, not %s, after waiting %g s at close",
                    self.rank,
                    transfer.step,
                    transfer.state.value,
                    wait_for.value,
                    seconds_max,
                )

        def leave() -> None:
            self._leaving = True

        self._command(leave)
        self._thread.join(2 * _LEAVE_SECONDS_MAX)
        if self._thread.is_alive():
            _log.error(
                "rank %d waited %g s for MPI to let go of its last messages to the stager; the process ends without",
                self.rank,
                2 * _LEAVE_SECONDS_MAX,
            )

    def _at_exit(self) -> None:
        self.close(wait_for=TransferState.STAGED, seconds_max=_EXIT_SECONDS_MAX)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_seconds = _PAUSE_SECONDS_MIN
        while not self._leaving:
            try:
                busy = self._turn()
            except HoldfastError as error:
                self._give_up(error)
                busy = True
            if busy:
                self._active_at = self._clock()
                pause_seconds = _PAUSE_SECONDS_MIN
                continue
            pause_seconds = self._rest(pause_seconds)
        for active in list(self._active.values()):
            self._end(
                active,
                TransferState.FAILED,
                "unknown: the link was closed before the stager had said how it ended",
            )
            active.release()
        self._end_fetches()
        lost = isinstance(self.problem, PeerLost)
        self._port.leave(0.0 if self.problem else _LEAVE_SECONDS_MAX, lost=lost)

    def _turn(self) -> bool:
        """Look at everything once; whether anything had happened."""
        busy = False
        while self._commands:
            busy = True
            self._commands.popleft()()
        if self.problem is not None:
            return busy  # the stager is gone for good: MPI is not touched any more
        messages = self._port.poll()
        self._silence.note(bool(messages))
        for message in messages:
            self._hear(wire.decode(message))
        for active in list(self._active.values()):
            busy |= active.pump(self._port, self.welcome.attempt)
            self._forget_if_over(active)
        return busy or bool(messages)

    def _rest(self, pause_seconds: float) -> float:
        """Give the core away, and say how long to pause next time."""
        now = self._clock()
        for active in self._active.values():
            if active.notice_stall(now):
                self._active_at = now
        streaming = any(active.streaming(self._port) for active in self._active.values())
        if streaming and now - self._active_at < _STREAMING_SECONDS:
            time.sleep(0)
            return pause_seconds
        most_seconds = _SENDING_PAUSE_SECONDS_MAX if self._fetches else _IDLE_PAUSE_SECONDS_MAX
        if self._active:
            staged = all(active.transfer.settled.is_set() for active in self._active.values())
            most_seconds = _STAGED_PAUSE_SECONDS_MAX if staged else _SENDING_PAUSE_SECONDS_MAX
        self._wake.wait(pause_seconds)
        self._wake.clear()
        return min(most_seconds, pause_seconds * 1.3)

    def _give_up(self, error: HoldfastError) -> None:
        if self.problem is not None:
            return
        if self.goes_on_in:
            _log.error(
                "rank %d: THE STAGER IS LOST, nothing more of this job goes to it; training goes on, and checkpoints "
                "go on in %s alone: %s",
                self.rank,
                self.goes_on_in,
                error,
            )
        else:
            _log.error(
                "rank %d: NO MORE CHECKPOINTS are taken in this job, training goes on: %s", self.rank, error
            )
        self.events.emit("stager_lost", {"code": error.code, "message": str(error)})
        self.problem = error  # behind log and event: who sees the one has been told of the other
        self.appointments.end()
        self.schedule.end()
        for active in list(self._active.values()):
            active.forget_sending()
            self._end(active, TransferState.FAILED, str(error), error.code)
            active.release()
            self._forget_if_over(active)
        self._answer(error)
        self._end_fetches()

    def _answer(self, answer: Agreement | HoldfastError) -> bool:
        question, self._question = self._question, None
        if question is None:
            return False
        question.answer = answer
        question.answered.set()
        return True

    def _end_fetches(self) -> None:
        while self._fetches:
            self._fetches.popleft().answered.set()

    # -- messages ------------------------------------------------------------------------------------------------

    def _hear(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.BEAT:
                # It was heard, which is all that it says; and so that the stager knows the same of this rank:
                self._port.send(wire.encode(Kind.BEAT, attempt=self.welcome.attempt))
            case Kind.CREDIT:
                self._hear_credit(frame)
            case Kind.DECLINED | Kind.STAGED | Kind.DURABLE | Kind.FAILED:
                self._hear_verdict(frame)
            case Kind.SAVE_AT:
                self._hear_save_at(frame)
            case Kind.SAVE_EVERY:
                answer = hear_pace(frame, self.schedule, self.appointments.step_seconds)
                if answer is not None:
                    self._port.send(answer)
            case Kind.FETCHED:
                if not self._fetches:
                    raise ProtocolError(f"rank {self.rank}: the stager sent FETCHED, and nothing was asked")
                fetch = self._fetches.popleft()
                fetch.answer = frame
                fetch.answered.set()
            case Kind.RESERVED:
                self._answer(Agreement.from_frame(frame))
            case Kind.REFUSED:
                body = wire.json_body(frame, code=str, message=str)
                error = peer_error(body["code"], body["message"])
                if not self._answer(error):
                    raise error
            case _:
                raise ProtocolError(f"rank {self.rank}: the stager sent {frame.kind.name}, which it must not")

    def _hear_save_at(self, frame: Frame) -> None:
        try:
            word = Word(frame.flags)
        except ValueError:
            raise ProtocolError(f"SAVE_AT: flags {frame.flags}, expected 0 to {len(Word) - 1}") from None
        answer = self.appointments.heard(word, frame.step, frame.arg, wire.json_body(frame))
        if answer is not None:
            body = {} if answer.step_seconds is None else {"step_seconds": answer.step_seconds}
            self._port.send(
                wire.encode(
                    Kind.AT,
                    attempt=self.welcome.attempt,
                    step=answer.next_step,
                    arg=frame.arg,
                    body=wire.to_json(body),
                )
            )

    def _hear_credit(self, frame: Frame) -> None:
        active = self._active.get(frame.step)
        if active is None or not active.credit(frame.chunk, frame.arg):
            self._return(frame.step, frame.chunk)

    def _return(self, step: int, chunk: int) -> None:
        self._port.send(wire.encode(Kind.RETURN, attempt=self.welcome.attempt, step=step, chunk=chunk))

    def _hear_verdict(self, frame: Frame) -> None:
        body = wire.json_body(frame)
        reserve_bytes = body.get("new_pickle_reserve_bytes")
        if type(reserve_bytes) is int:
            self.new_pickle_reserve_bytes = max(self.new_pickle_reserve_bytes, reserve_bytes)
        active = self._active.get(frame.step)
        if active is None:
            self._verdicts.keep(frame)
            return
        self._judge(active, frame.kind, body)

    def _judge(self, active: Outgoing, kind: Kind, body: dict[str, Any]) -> None:
        step = active.transfer.step
        match kind:
            case Kind.STAGED:
                self.staged_step = max(self.staged_step, step)
                active.transfer.reach(TransferState.STAGED)
                self.events.emit("staged", active.transfer.summary(), step=step)
            case Kind.DURABLE:
                self.durable_step = max(self.durable_step, step)
                active.transfer.reach(TransferState.DURABLE)
                self.events.emit("durable", active.transfer.summary(), step=step)
                self._forget_if_over(active)
            case Kind.DECLINED:
                code = str(body.get("code", ""))
                self._end(active, TransferState.DECLINED, str(body.get("reason", "")), code)
            case _:
                code = str(body.get("code", ""))
                self._end(active, TransferState.FAILED, str(body.get("message", "")), code)

    # -- transfers -----------------------------------------------------------------------------------------------

    def _begin(self, active: Outgoing) -> None:
        transfer = active.transfer
        if self.problem is not None:
            transfer.reach(TransferState.DECLINED, str(self.problem), self.problem.code)
            active.release()
            return
        self._active[transfer.step] = active
        verdict = self._verdicts.of(transfer.step)
        if verdict is not None:
            self._judge(active, verdict.kind, wire.json_body(verdict))
            return
        active.offer(self._port, self.welcome.attempt)

    def _end(self, active: Outgoing, state: TransferState, reason: str, code: str = "") -> None:
        """Give a transfer up; credits go back, payloads under way come to their end."""
        transfer = active.transfer
        if transfer.state.final:
            return
        transfer.reach(state, reason, code)
        unused = active.unused()
        if self.problem is None:
            for chunk in unused:
                self._return(transfer.step, chunk)
        if not active.sending:
            active.release()
        self.events.emit(state.value, {**transfer.summary(), "reason": reason}, step=transfer.step)
        self._forget_if_over(active)

    def _forget_if_over(self, active: Outgoing) -> None:
        if active.over:
            self._active.pop(active.transfer.step, None)


def _await_welcome(port: StagerPort, deadline: float, seconds_max: float) -> Welcome:
    while time.monotonic() < deadline:
        for message in port.poll():
            frame = wire.decode(message)
            if frame.kind is Kind.WELCOME:
                return Welcome.from_frame(frame)
            if frame.kind is not Kind.BEAT:
                raise ProtocolError(f"the stager said {frame.kind.name} before WELCOME")
        time.sleep(_AWAITING_PAUSE_SECONDS)
    raise PeerLost(f"the stager did not answer within {seconds_max:g} s; look at its messages")
