"""The link to the stager: the one thread of a training rank that sends and receives after start-up.

    training thread      agree, announce, offer, decline, close ──► commands ─┐
    copy thread          SliceSource.is_ready(frame) ─────────────────────────┤
                                                                              ▼
    this thread          commands · control messages · send what is credited and copied · deadlines · rest

`StagerSession` holds the checkpoints that are on their way, and what the stager was asked. What goes wrong with the
stager never stops the training: it becomes `problem`, said once and loudly, and every later offer is declined at once.
Where the stager can be reached again (`Rejoining`), a session with it takes the place of the lost one: rank 0 announces
the layout once more, `problem` is cleared, and the next save is offered as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError, PeerLost, StateError
from holdfast.faultpoint import Point, reach
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.notices.notice import Notice
from holdfast.process import at_exit
from holdfast.ring.remains import Asked
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.doubt import EARLIER_ATTEMPTS_MAX, Doubt
from holdfast.wire.frames import Kind
from holdfast.wire.pace import Wish
from holdfast.wire.state_messages import Agreement, Proposal
from holdfast.wire.welcome import Welcome
from trainer_side.background_thread import BackgroundThread, ThreadDied, thread_died
from trainer_side.link.greeting import Greeted
from trainer_side.link.hearing import Hearing
from trainer_side.link.outgoing import Outgoing, SendPlan
from trainer_side.link.pauses import Pauses
from trainer_side.link.rejoining import ComeAgain, Rejoining
from trainer_side.link.schedule import Schedule
from trainer_side.link.stager_session import StagerSession
from trainer_side.link.to_stager import TimesLost
from trainer_side.notice.appointments import Appointments
from trainer_side.ranks.peers import Peers
from trainer_side.ranks.ports import StartReplaced
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
        peers: The other ranks, for restore.
        events: Event log; may be replaced before the first offer.
        problem: Why no checkpoint is taken now; None while all is well. Any thread.
        appointments: At which step this rank acts on a notice. `schedule`: at which it saves, with `every="auto"`.
        on_doubt: As `ToStager.on_doubt`; in the link's thread.
    """

    def __init__(
        self,
        config: TrainerConfig,
        greeted: Greeted,
        *,
        rank: int,
        ranks: int,
        peers: Peers | None = None,
        again: ComeAgain | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock = config, clock
        self.rank, self.ranks = rank, ranks
        self._peers = peers
        self.events = EventLog(None, role="trainer", rank=rank)
        self.problem: HoldfastError | None = None
        self.appointments = Appointments(wait_seconds_max=config.stager_seconds_max)
        self.schedule = Schedule(auto=False, wait_seconds_max=config.stager_seconds_max)
        self.on_doubt: Callable[[Doubt], None] = lambda _: None
        self._hearing = Hearing(rank, self.appointments, self.schedule, self._hear_doubt)
        self._goes_on_in = ""  # names of local tiers
        self._plan: SendPlan | None = None
        self._layout: Layout | None = None  # on rank 0: as it was announced
        self._newest_step = -1
        self._accepted: list[Transfer] = []  # by the training thread, for close()
        self._commands: deque[Callable[[], None]] = deque()
        self._session = self._open(greeted)
        self._pauses = Pauses(self._session.outbox, clock, greeted.port.crowding)
        self._rejoining: Rejoining | None = None
        if again is not None:
            self._rejoining = Rejoining(
                again,
                rank=rank,
                ranks=ranks,
                start_seconds_max=config.start_seconds_max,
                at_risk=self._at_risk if rank == 0 else None,
            )
        self._attempts: tuple[int, ...] = ()  # of the sessions before
        self._last_problem: HoldfastError | None = None
        self._lost_before = TimesLost()  # and reached again
        self._lost_at = 0.0
        # What was to be told while the stager was lost:
        self._untold: Notice | None = None
        self._untold_doubts: list[Doubt] = []
        self._leaving = self._is_dead = False
        self._closed = False
        self._not_at_exit: Callable[[], None] = lambda: None
        self._thread = BackgroundThread("holdfast-link", self._run, rank=rank, task=_TASK, died=self._died)
        self._thread.start()

    def _open(self, greeted: Greeted, before: StagerSession | None = None) -> StagerSession:
        return StagerSession(
            self._config,
            greeted,
            rank=self.rank,
            events=lambda: self.events,
            command=self._command,
            clock=self._clock,
            before=before,
        )

    def _hear_doubt(self, doubt: Doubt) -> None:
        self.on_doubt(doubt)

    @property
    def welcome(self) -> Welcome:
        """What the stager said when it took this rank."""
        return self._session.welcome

    @property
    def attempt(self) -> int:
        return self.welcome.attempt

    @property
    def lives(self) -> bool:
        return self.problem is None

    @property
    def times_lost(self) -> TimesLost:
        if self.lives:
            return self._lost_before
        losses, seconds = self._lost_before
        return TimesLost(losses + 1, seconds + self._clock() - self._lost_at)

    def has_lost(self, error: HoldfastError) -> bool:
        return error is self._last_problem

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
        return self._session.outbox.staged_step

    @property
    def durable_step(self) -> int:
        return self._session.outbox.durable_step

    @property
    def new_pickle_reserve_bytes(self) -> int:
        return self._session.outbox.new_pickle_reserve_bytes

    # -- what the training thread asks for -----------------------------------------------------------------------

    def beside(self, tiers: TierSet) -> None:
        self._goes_on_in = tiers.names

    def auto_interval(self) -> tuple[Schedule, Callable[[Wish], None] | None]:
        self.schedule.choose(auto=True)
        return self.schedule, self.wish if self.rank == 0 else None

    def hurry(self, seconds_max: float) -> None:
        self._session.questions.hurry(seconds_max)

    def agree(self, proposal: Proposal) -> Agreement:
        return self._session.questions.agree(proposal)

    def fetch(
        self, asked: Asked, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        return self._session.questions.fetch(asked, attempt=attempt, step=step, chunk=chunk, body=body)

    def fits(self, step: int) -> None:
        self._tell(lambda: self._session.port.send(wire.encode(Kind.FITS, attempt=self.attempt, step=step)))

    def announce(self, layout: Layout) -> None:
        """Use `layout` for all later offers. Every rank calls it with the same one; rank 0 sends it to the stager."""
        self._plan = SendPlan.of(layout, self.rank)
        if self.rank == 0:

            def tell() -> None:
                self._layout = layout
                self._announce()

            self._command(tell)

    def offer(self, step: int, source: SliceSource, record: SaveRecord) -> Transfer:
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
        problem = self.problem
        refusal = None if problem is None else Reason.of_error(problem)
        if problem is not None:
            self._newest_step = max(self._newest_step, step)
            # The link thread may have reached the stager, and read the newest step, since `problem` was read here.
            self._tell(lambda: self._tell_passed(step))
        elif step <= self._newest_step:
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
        verdict = self._session.outbox.verdicts.of(step)
        return None if verdict is None else Reason.of_body(wire.json_body(verdict))

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        """See `ToStager.decline`.

        Args:
            step: A new step, or one that was offered and cannot go on.
            reason: Why.
            needed_pickle_bytes: Above 0: the pickle has outgrown its reserve; rank 0 only.
        """
        self._newest_step = max(self._newest_step, step)

        def tell() -> None:
            message = self._decline_message(step, reason.text, needed_pickle_bytes)
            self._session.outbox.decline(step, message, reason.of_rank(self.rank))

        self._tell(tell)

    def _decline_message(self, step: int, why: str, needed_pickle_bytes: int = 0) -> bytes:
        return wire.encode(
            Kind.DECLINE,
            attempt=self.attempt,
            step=step,
            arg=needed_pickle_bytes,
            body=why.encode()[:2000],
        )

    def _tell_passed(self, step: int) -> None:
        self._session.port.send(self._decline_message(step, "this rank had lost the stager"))

    def doubt(self, doubt: Doubt) -> None:
        def tell() -> None:
            if self.problem is None:
                self._tell_doubt(doubt)
            else:
                self._untold_doubts.append(doubt)

        self._command(tell)

    def _tell_doubt(self, doubt: Doubt) -> None:
        doubt = doubt._replace(earlier_attempts=self._attempts)
        self._session.port.send(doubt.to_frame(Kind.DOUBT, attempt=self.attempt))

    def notice(self, notice: Notice) -> None:
        if self.problem is not None:
            _log.error(
                "rank %d: %s; the stager is lost, so no step is named at which all ranks save",
                self.rank,
                notice.sentence(),
            )

        def tell() -> None:
            if self.problem is None:
                self._tell_notice(notice)
            else:
                self._untold = notice

        self._command(tell)

    def _tell_notice(self, notice: Notice) -> None:
        body = wire.to_json(notice.to_json())
        self._session.port.send(wire.encode(Kind.NOTICE, attempt=self.attempt, body=body))

    def wish(self, wish: Wish) -> None:
        """Ask the stager to bring all ranks to another interval; rank 0 only. Any thread."""
        body = wire.to_json(wish.to_json())
        self._tell(lambda: self._session.port.send(wire.encode(Kind.WISH, attempt=self.attempt, body=body)))

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
                "rank %d waited %g s for its last messages to the stager to be sent; the process ends without them",
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

    def _tell(self, tell: Callable[[], None]) -> None:
        """Have the stager told in the link's thread, unless it is lost by then."""
        if self.problem is None:
            self._command(lambda: tell() if self.problem is None else None)

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
                self._lose(error)
                busy = True
            except Exception as error:  # noqa: BLE001 - a bug here must not leave the stager waiting for this rank
                self._break(thread_died(error, rank=self.rank, name=self._thread.name, task=_TASK))
                busy = True
            if busy:
                self._pauses.busy()
            else:
                self._pauses.rest(fetching=self._session.questions.fetching)
        if self._rejoining is not None:
            self._rejoining.end()
        self._session.outbox.close()
        self._session.questions.end(self.problem or PeerLost(f"rank {self.rank}: the link is closed"))
        lost = isinstance(self.problem, PeerLost) and not isinstance(self.problem, ThreadDied)
        self._session.port.leave(0.0 if self.problem else _LEAVE_SECONDS_MAX, lost=lost)

    def _turn(self) -> bool:
        """Look at everything once; whether anything had happened."""
        busy = self._obey()
        if self.problem is not None:  # nothing of the session is touched any more
            return self._look_for_stager() or busy
        messages = self._session.port.poll()
        self._session.silence.note(bool(messages))
        for message in messages:
            self._hearing.hear(self._session, wire.decode(message))
        busy |= self._session.outbox.pump()
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
                self._session.port.leave(0.0)
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
            self._session.outbox.begin(active)
            return
        active.transfer.reach(TransferState.DECLINED, Reason.of_error(self.problem))
        active.release()

    def _lose(self, error: HoldfastError) -> None:
        """The stager is lost. Try to reach its next process, unless the error asks for a person."""
        is_gone = isinstance(error, PeerLost) and not isinstance(error, (ThreadDied, StartReplaced))
        if self.problem is None and is_gone and self._rejoining is not None:
            self._session.port.leave(0.0, lost=True)
            self._give_up(error, comes_again=True)
            self._rejoining.begin(self.welcome)
        else:
            self._give_up(error)

    def _give_up(self, error: HoldfastError, *, comes_again: bool = False) -> None:
        if self.problem is not None:
            return
        what = "the link to the stager is broken" if isinstance(error, ThreadDied) else "the stager is lost"
        if self._goes_on_in and comes_again:
            means = f"nothing goes to it until it is reached again; training goes on, and {self._kept_there}"
        elif self._goes_on_in:
            means = f"nothing more of this job goes to it; training goes on, and {self._kept_there}"
        elif comes_again:
            means = "no checkpoints are taken until it is reached again; training goes on"
        else:
            means = "no more checkpoints are taken in this job; training goes on"
        _log.error("rank %d: %s, and %s: %s", self.rank, what, means, error)
        self.events.emit("stager_lost", {"code": error.code, "message": str(error)})
        self._lost_at = self._clock()
        # Behind log and event: who sees the one has been told of the other.
        self.problem = self._last_problem = error
        self.appointments.end()
        self.schedule.end()
        self._session.outbox.lose(error)
        self._session.questions.end(error)

    def _look_for_stager(self) -> bool:
        """Go on with the stager, once it is reached again; whether it is."""
        try:
            found = None if self._rejoining is None else self._rejoining.look()
        except ThreadDied as died:
            self.problem, self._rejoining = died, None
            return True
        if found is None:
            return False
        self._attempts = (*self._attempts, self.attempt)[-EARLIER_ATTEMPTS_MAX:]
        self._session = self._open(found.greeted, before=self._session)
        self._pauses.outbox = self._session.outbox
        reach(Point.REJOINED)
        self._lost_before = self.times_lost
        self.events.emit(
            "stager_back", {"seconds": found.seconds, "tries": found.tries, "attempt": self.attempt}
        )
        _log.warning(
            "rank %d: the stager is reached again after %.0f s and %d tries, and this job is attempt %d from now on; "
            "the next save goes to it",
            self.rank,
            found.seconds,
            found.tries,
            self.attempt,
        )
        passed = self._newest_step  # the training thread offers the next one as soon as `problem` is cleared
        # Behind log and event: who sees that the link lives has been told that the stager is back.
        self.problem = None
        self._announce()
        # Ranks come one after the other: a step of others that this one has passed without a stager ends at once.
        if passed > self.durable_step:
            self._tell_passed(passed)
        doubts, self._untold_doubts = self._untold_doubts, []
        for doubt in doubts:
            self._tell_doubt(doubt)
        notice, self._untold = self._untold, None
        if notice is not None and (notice.seconds_left() or 1.0) > 0:
            self._tell_notice(notice)
        return True

    def _announce(self) -> None:
        """Tell the stager the layout of later offers; on rank 0."""
        if self._layout is not None and self.problem is None:
            body = self._layout.to_bytes()
            self._session.port.send(wire.encode(Kind.LAYOUT, attempt=self.attempt, body=body))

    @property
    def _kept_there(self) -> str:
        return f"checkpoints are kept in {self._goes_on_in} alone"

    def _at_risk(self) -> str:
        """The loss if the job ended now. Any thread."""
        if self._goes_on_in:
            return self._kept_there
        done, durable, staged = self.appointments.promises.last_step, self.durable_step, self.staged_step
        said = [f"training has done step {done}"] if done >= 0 else []
        said.append(
            f"step {durable} is durable" if durable >= 0 else "no step of this job is known to be durable"
        )
        if staged > durable:
            said.append(f"step {staged} was staged on the lost stager")
        return f"{', '.join(said)}; what was trained since is lost if the job ends now"
