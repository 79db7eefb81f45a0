"""The link to the stager: the one thread of a training rank that talks MPI after start-up.

    training thread      agree, announce, offer, decline, close ──► commands ─┐
    copy thread          SliceSource.is_ready(frame) ─────────────────────────┤
                                                                              ▼
    this thread          commands · control messages · send what is credited and copied · deadlines · rest

`Outbox` holds the checkpoints that are on their way, `Questions` what the stager was asked. What goes wrong with the
stager never stops the training: it becomes `problem`, said once and loudly, and every later offer is declined at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.image.layout import Layout
from holdfast.notices.messages import Announcement, StepAnswer
from holdfast.notices.notice import Notice
from holdfast.process import at_exit
from holdfast.ring.remains import Asked
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Frame, Kind, peer_error
from holdfast.wire.pace import Wish
from holdfast.wire.state_messages import Agreement, Proposal
from holdfast.wire.welcome import Welcome
from trainer_side.background_thread import BackgroundThread, ThreadDied, thread_died
from trainer_side.link.outbox import Outbox, StagerSilence
from trainer_side.link.outgoing import Outgoing, SendPlan
from trainer_side.link.pauses import Pauses
from trainer_side.link.questions import Questions
from trainer_side.link.schedule import Schedule
from trainer_side.notice.appointments import Appointments
from trainer_side.ranks.peers import Peers
from trainer_side.ranks.ports import StagerPort
from trainer_side.tiers.tier_set import TierSet
from trainer_side.transfer import SliceSource, Transfer, TransferState

_log = logging.getLogger("holdfast.trainer.link")

_LEAVE_SECONDS_MAX = 5.0
_QUIET_SECONDS = 10.0  # so long nobody is told what the end waits for
_EXIT_SECONDS_MAX = 10.0
_TASK = "sends checkpoints to the stager and hears from it"


class Link:
    """See the module; a `ToStager`. Its methods belong to the training thread unless they say otherwise.

    Attributes:
        rank: This training rank. `ranks`: how many there are.
        welcome: What the stager said at start-up.
        peers: The other ranks, for restore.
        events: Event log; may be replaced before the first offer.
        problem: Why no checkpoint can be taken any more; None while all is well. Any thread.
        appointments: At which step this rank acts on a notice. `schedule`: at which it saves, with `every="auto"`.
        on_doubt: As `ToStager.on_doubt`; in the link's thread.
    """

    def __init__(
        self,
        config: TrainerConfig,
        port: StagerPort,
        welcome: Welcome,
        *,
        rank: int,
        ranks: int,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._clock = port, clock
        self.welcome, self.rank, self.ranks = welcome, rank, ranks
        self._peers = peers
        self.events = EventLog(None, role="trainer", rank=rank)
        self.problem: HoldfastError | None = None
        self.appointments = Appointments(wait_seconds_max=config.stager_seconds_max)
        self.schedule = Schedule(auto=False, wait_seconds_max=config.stager_seconds_max)
        self.on_doubt: Callable[[Doubt], None] = lambda _: None
        self._goes_on_in = ""  # names of local tiers
        self._plan: SendPlan | None = None
        self._newest_step = -1
        self._accepted: list[Transfer] = []  # by the training thread, for close()
        self._commands: deque[Callable[[], None]] = deque()
        self._outbox = Outbox(port, welcome.attempt, lambda: self.events)
        self._pauses = Pauses(self._outbox, clock, port.crowding)
        self._questions = Questions(config, port, welcome, rank=rank, command=self._command)
        self._silence = StagerSilence(rank, max(config.stager_seconds_max, 2 * welcome.beat_seconds), clock)
        self._leaving = self._is_dead = False
        self._closed = False
        self._not_at_exit: Callable[[], None] = lambda: None
        self._thread = BackgroundThread("holdfast-link", self._run, rank=rank, task=_TASK, died=self._died)
        self._thread.start()

    @property
    def attempt(self) -> int:
        return self.welcome.attempt

    @property
    def lives(self) -> bool:
        return self.problem is None

    @property
    def store_url(self) -> str:
        return self.welcome.store_url

    @property
    def chunk_bytes(self) -> int:
        return self.welcome.chunk_bytes

    @property
    def peers(self) -> Peers:
        if self._peers is None:
            raise ConfigError(
                "this link to the stager was made without peers, so it cannot reach the other ranks"
            )
        return self._peers

    @property
    def staged_step(self) -> int:
        return self._outbox.staged_step

    @property
    def durable_step(self) -> int:
        return self._outbox.durable_step

    @property
    def new_pickle_reserve_bytes(self) -> int:
        return self._outbox.new_pickle_reserve_bytes

    # -- what the training thread asks for -----------------------------------------------------------------------

    def beside(self, tiers: TierSet) -> None:
        self._goes_on_in = tiers.names

    def auto_interval(self) -> tuple[Schedule, Callable[[Wish], None] | None]:
        self.schedule.choose(auto=True)
        return self.schedule, self.wish if self.rank == 0 else None

    def hurry(self, seconds_max: float) -> None:
        self._questions.hurry(seconds_max)

    def agree(self, proposal: Proposal) -> Agreement:
        return self._questions.agree(proposal)

    def fetch(
        self, asked: Asked, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        return self._questions.fetch(asked, attempt=attempt, step=step, chunk=chunk, body=body)

    def fits(self, step: int) -> None:
        message = wire.encode(Kind.FITS, attempt=self.welcome.attempt, step=step)
        self._command(lambda: self._port.send(message) if self.problem is None else None)

    def announce(self, layout: Layout) -> None:
        """Use `layout` for all later offers. Every rank calls it with the same one; rank 0 sends it to the stager."""
        self._plan = SendPlan.of(layout, self.rank)
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
        refusal = None if self.problem is None else Reason.of_error(self.problem)
        if refusal is None and step <= self._newest_step:
            # By the same rule on each rank, so that all leave it out.
            refusal = DeclineCause.NOT_NEW.because(
                f"step {step} is not above step {self._newest_step}, which was saved or declined before"
            )
        if refusal is not None:
            transfer.reach(TransferState.DECLINED, refusal)
            transfer.released.set()
            return transfer
        self._newest_step = step
        self._accepted = [other for other in self._accepted if not other.ended.is_set()] + [transfer]
        self._command(lambda: self._begin(Outgoing(transfer, source, plan)))
        return transfer

    def answer(self, step: int) -> Reason | None:
        verdict = self._outbox.verdicts.of(step)
        return None if verdict is None else Reason.of_body(wire.json_body(verdict))

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        """See `ToStager.decline`.

        Args:
            step: A new step, or one that was offered and cannot go on.
            reason: Why.
            needed_pickle_bytes: Above 0: the pickle has outgrown its reserve; rank 0 only.
        """
        self._newest_step = max(self._newest_step, step)
        message = wire.encode(
            Kind.DECLINE,
            attempt=self.welcome.attempt,
            step=step,
            arg=needed_pickle_bytes,
            body=reason.text.encode()[:2000],
        )
        if self.problem is None:
            told = reason.of_rank(self.rank)
            self._command(lambda: self._outbox.decline(step, message, told))

    def doubt(self, doubt: Doubt) -> None:
        message = doubt.to_frame(Kind.DOUBT, attempt=self.welcome.attempt)
        self._command(lambda: self._port.send(message) if self.problem is None else None)

    def notice(self, notice: Notice) -> None:
        def tell() -> None:
            body = wire.to_json(notice.to_json())
            self._port.send(wire.encode(Kind.NOTICE, attempt=self.welcome.attempt, body=body))

        if self.problem is None:
            self._command(tell)
        else:
            _log.error(
                "rank %d: %s; the stager is lost, so no step is named at which all ranks save",
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
        if not self._closed:
            self._closed = True
            self._wait(wait_for, seconds_max)

        def leave() -> None:
            self._leaving = True

        self._command(
            leave
        )  # again after a close() that an exception has ended: nobody else may use the port yet
        self._thread.join(2 * _LEAVE_SECONDS_MAX)
        self._not_at_exit()
        if self._thread.is_alive():
            _log.error(
                "rank %d waited %g s for MPI to send its last messages to the stager; the process ends without them",
                self.rank,
                2 * _LEAVE_SECONDS_MAX,
            )

    def _wait(self, wait_for: TransferState, seconds_max: float) -> None:
        deadline = self._clock() + seconds_max
        is_said = self.rank != 0  # all of them wait: one says so
        for transfer in self._accepted:
            event = transfer.ended if wait_for is TransferState.DURABLE else transfer.settled
            quiet_seconds = min(_QUIET_SECONDS, max(0.0, deadline - self._clock()))
            if not is_said and not event.wait(quiet_seconds) and self.problem is None:
                is_said = True
                _log.warning(
                    "waiting until %s for step %d, which is %s, to be %s; if it is the store, the stager says why",
                    time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - self._clock())),
                    transfer.step,
                    transfer.state.value,
                    wait_for.value,
                )
            if not event.wait(max(0.0, deadline - self._clock())) and self.problem is None:
                _log.error(
                    "rank %d: close() waited %g s for step %d, which is %s and not yet %s; look at the log of the "
                    "flusher",
                    self.rank,
                    seconds_max,
                    transfer.step,
                    transfer.state.value,
                    wait_for.value,
                )

    def close_at_exit(self) -> None:
        """A script that ends without `close` must not leave the stager waiting for this rank."""
        self._not_at_exit = at_exit(self._at_exit)

    def _at_exit(self) -> None:
        self.close(wait_for=TransferState.STAGED, seconds_max=_EXIT_SECONDS_MAX)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._pauses.wake()
        if self._is_dead:
            self._obey()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._leaving:
            try:
                busy = self._turn()
            except ThreadDied as error:  # one of the port's
                self._break(error)
                busy = True
            except HoldfastError as error:
                self._give_up(error)
                busy = True
            except Exception as error:  # noqa: BLE001 - a bug here must not leave the stager waiting for this rank
                self._break(thread_died(error, rank=self.rank, name=self._thread.name, task=_TASK))
                busy = True
            if busy:
                self._pauses.busy()
            else:
                self._pauses.rest(fetching=self._questions.fetching)
        self._outbox.close()
        self._questions.end(self.problem or PeerLost(f"rank {self.rank}: the link is closed"))
        lost = isinstance(self.problem, PeerLost) and not isinstance(self.problem, ThreadDied)
        self._port.leave(0.0 if self.problem else _LEAVE_SECONDS_MAX, lost=lost)

    def _turn(self) -> bool:
        """Look at everything once; whether anything had happened."""
        busy = self._obey()
        if self.problem is not None:
            return busy  # the stager is gone for good: MPI is not touched any more
        messages = self._port.poll()
        self._silence.note(bool(messages))
        for message in messages:
            self._hear(wire.decode(message))
        busy |= self._outbox.pump()
        return busy or bool(messages)

    def _obey(self) -> bool:
        """Do what the training thread has asked for; whether there was anything."""
        busy = False
        while self._commands:
            try:
                command = self._commands.popleft()
            except IndexError:  # where this thread is dead, two others may be here
                break
            busy = True
            command()
        return busy

    def _break(self, error: ThreadDied) -> None:
        """A bug, in this thread: the stager hears that this rank has left, and tells the others."""
        if self.problem is None:
            with contextlib.suppress(Exception):  # the port itself may be what is broken
                self._port.leave(0.0)
        self._give_up(error)

    def _died(self, error: ThreadDied) -> None:
        """The thread itself has ended by an exception."""
        self._is_dead = True
        try:
            self._break(error)
        finally:
            self.problem = self.problem or error
            self._obey()

    def _begin(self, active: Outgoing) -> None:
        if self.problem is None:
            self._outbox.begin(active)
            return
        active.transfer.reach(TransferState.DECLINED, Reason.of_error(self.problem))
        active.release()

    def _give_up(self, error: HoldfastError) -> None:
        if self.problem is not None:
            return
        what = "the link to the stager is broken" if isinstance(error, ThreadDied) else "the stager is lost"
        if self._goes_on_in:
            _log.error(
                "rank %d: %s, and nothing more of this job goes to it; training goes on, and checkpoints are kept in "
                "%s alone: %s",
                self.rank,
                what,
                self._goes_on_in,
                error,
            )
        else:
            _log.error(
                "rank %d: %s, and no more checkpoints are taken in this job; training goes on: %s",
                self.rank,
                what,
                error,
            )
        self.events.emit("stager_lost", {"code": error.code, "message": str(error)})
        self.problem = error  # behind log and event: who sees the one has been told of the other
        self.appointments.end()
        self.schedule.end()
        self._outbox.lose(error)
        self._questions.end(error)

    # -- messages ------------------------------------------------------------------------------------------------

    def _hear(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.BEAT:
                # It was heard, which is all that it says; and so that the stager knows the same of this rank:
                self._port.send(wire.encode(Kind.BEAT, attempt=self.welcome.attempt))
            case Kind.CREDIT:
                self._outbox.credited(frame)
            case Kind.DECLINED | Kind.STAGED | Kind.DURABLE | Kind.FAILED:
                self._outbox.judged(frame)
            case Kind.SAVE_AT:
                self._reply(frame, Kind.AT, self.appointments.heard(Announcement.from_frame(frame)))
            case Kind.SAVE_EVERY:
                seconds = self.appointments.step_seconds
                self._reply(frame, Kind.HERE, self.schedule.heard(Announcement.from_frame(frame), seconds))
            case Kind.DOUBTED:
                self.on_doubt(Doubt.from_frame(frame))
            case Kind.FETCHED:
                self._questions.fetched(frame)
            case Kind.RESERVED:
                self._questions.agreed(Agreement.from_frame(frame))
            case Kind.REFUSED:
                body = wire.json_body(frame, code=str, message=str)
                error = peer_error(body["code"], body["message"])
                if self._questions.agreed(error):
                    return
                if not isinstance(error, PeerLost):
                    raise error
                # Other ranks asked, and this one was missing: its link is as good as before.
                _log.error("rank %d has not come to a save of the other ranks: %s", self.rank, error)
            case _:
                raise ProtocolError(
                    f"rank {self.rank}: the stager sent {frame.kind.name}, which only ranks may send; "
                    "install the same holdfast on all machines"
                )

    def _reply(self, frame: Frame, kind: Kind, answer: StepAnswer | None) -> None:
        if answer is not None:
            self._port.send(answer.to_frame(kind, attempt=frame.attempt))
