"""The link to the stager: the thread of a training rank that exchanges messages with the stager after start-up.

    training thread      agree, offer, decline, tell, close ──► commands ─┐
    copy thread          SliceSource.is_ready(frame) ─────────────────────┤
                                                                          ▼
    this thread          commands · messages · send frames that are credited and copied · deadlines · rest

`StagerSession` holds the checkpoints in flight and the open requests. Losing the stager never stops the training: the
link sets `JobState.problem`, logs one error, and declines every later offer at once. If `Rejoining` reaches a stager
again, a new session replaces the lost one, the link clears `problem`, and the next save is offered as usual.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from holdfast.config import TrainerConfig
from holdfast.errors import HoldfastError, PeerLost
from holdfast.faultpoint import Point, reach
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from holdfast.process import at_exit
from holdfast.ring.remains import Asked
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.background_thread import BackgroundThread, ThreadDied, thread_died
from trainer_side.link.greeting import Greeted
from trainer_side.link.held_shares import HeldShares
from trainer_side.link.inbox import ShareInbox, StagerSession
from trainer_side.link.job_state import JobState
from trainer_side.link.last_transfers import LastTransfers
from trainer_side.link.outgoing import Outgoing, SendPlan
from trainer_side.link.poll_backoff import PollBackoff
from trainer_side.link.rejoining import Reconnect, Rejoining
from trainer_side.link.stager_message import StagerMessage
from trainer_side.ranks.ports import StartReplaced
from trainer_side.transfer import SliceSource, Transfer, TransferState

_log = logging.getLogger("holdfast.trainer.link")

_LEAVE_SECONDS_MAX = 5.0
_EXIT_SECONDS_MAX = 10.0
_TASK = "exchanges messages with the stager"


class Link:
    """A `ToStager` for one stager. Methods belong to the training thread unless they say otherwise.

    `again`: How to reach a lost stager again; None: it stays lost.

    Attributes:
        on_lost, on_back: Called in the link's thread, right after `job` notes that the stager is lost, or back;
            `on_lost` again once `is_awaited` ends without it.
        is_awaited: The stager is lost, and its next process may still continue its attempt.
        name: The stager's name in the log.
    """

    def __init__(
        self,
        config: TrainerConfig,
        greeted: Greeted,
        inbox: ShareInbox,
        events: EventLog,
        *,
        rank: int,
        again: Reconnect | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._inbox, self._events, self._clock = config, inbox, events, clock
        welcome = greeted.welcome
        self.job = JobState(
            rank,
            welcome.ranks,
            store_url=welcome.store_url,
            chunk_bytes=welcome.chunk_bytes,
            attempt=welcome.attempt,
            seen=welcome.seen,
            clock=clock,
        )
        tiers = ", ".join(config.tiers)
        self._kept_there = f"checkpoints are kept in {tiers} alone" if tiers else ""
        self.on_lost: Callable[[HoldfastError], None] = lambda _: None
        self.on_back: Callable[[], None] = lambda: None
        self.name = greeted.name
        self.is_awaited, self._awaited_until = False, 0.0
        self._plan: SendPlan | None = None
        self._newest_step = -1
        self._accepted: list[Transfer] = []  # by the training thread, for close()
        self._commands: deque[Callable[[], None]] = deque()
        self._session = self._open(greeted)
        self._backoff = PollBackoff(self._session.outbox, clock, greeted.port.crowding)
        self._rejoining: Rejoining | None = None
        if again is not None:
            self._rejoining = Rejoining(
                again,
                self.job,
                start_seconds_max=config.start_seconds_max,
                last_step=lambda: inbox.last_step,
                kept_there=self._kept_there,
            )
        self._held = HeldShares(clock)
        self._untold: list[StagerMessage] = []  # while the stager is lost
        self._leaving = self._is_dead = False
        self._closed = False
        self._not_at_exit: Callable[[], None] = lambda: None
        self._thread = BackgroundThread("holdfast-link", self._run, rank=rank, task=_TASK, died=self._died)
        self._thread.start()

    def _open(self, greeted: Greeted) -> StagerSession:
        return StagerSession(
            self._config, greeted, self.job, self._events, command=self._command, clock=self._clock
        )

    # -- commands of the training thread -------------------------------------------------------------------------

    def agree(self, proposal: Proposal, *, seconds_max: float | None = None) -> Agreement:
        return self._session.requests.agree(proposal, seconds_max)

    def fetch(
        self, asked: Asked, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        return self._session.requests.fetch(asked, attempt=attempt, step=step, chunk=chunk, body=body)

    def offer(self, step: int, source: SliceSource, record: SaveRecord, layout: Layout) -> Transfer:
        transfer = Transfer(step, record)
        self.send(transfer, source, layout)
        if not transfer.ended.is_set():
            self._accepted = [other for other in self._accepted if not other.ended.is_set()] + [transfer]
        return transfer

    def send(
        self, transfer: Transfer, source: SliceSource, layout: Layout, chunks: range | None = None
    ) -> None:
        """Offer a checkpoint, of which the stager receives `chunks`; None: all. They stay the same for a layout."""
        step, problem = transfer.step, self.job.problem
        refusal = None if problem is None else Reason.of_error(problem)
        if problem is not None:
            self._newest_step = max(self._newest_step, step)
            # The link thread may have reached the stager, and read the newest step, since `problem` was read here.
            self._command_if_alive(lambda: self._decline_passed(step))
        elif step <= self._newest_step:
            # Every rank applies this rule, so all ranks skip the step.
            refusal = DeclineCause.NOT_NEW.because(
                f"step {step} is not above step {self._newest_step}, which was saved or declined before"
            )
        if refusal is not None:
            transfer.reach(TransferState.DECLINED, refusal)
            transfer.release()
            return
        self._newest_step = step
        if self._plan is None or self._plan.layout is not layout:
            self._plan = SendPlan.of(layout, self.job.rank, chunks)
        outgoing = Outgoing(transfer, source, self._plan)
        self._command(lambda: self._begin(outgoing))

    def answer(self, step: int) -> Reason | None:
        verdict = self._session.outbox.verdict(step)
        return None if verdict is None else Reason.of_body(wire.json_body(verdict))

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        self._newest_step = max(self._newest_step, step)

        def tell() -> None:
            message = self._decline_message(step, reason.text, needed_pickle_bytes)
            self._session.outbox.decline(step, message, reason.of_rank(self.job.rank))

        self._command_if_alive(tell)

    def _decline_message(self, step: int, why: str, needed_pickle_bytes: int = 0) -> bytes:
        return wire.encode(
            Kind.DECLINE,
            attempt=self.job.attempt,
            step=step,
            arg=needed_pickle_bytes,
            body=why.encode()[:2000],
        )

    def _decline_passed(self, step: int) -> None:
        self._session.port.send(self._decline_message(step, "this rank had lost the stager"))

    def tell(self, message: StagerMessage) -> None:
        def tell() -> None:
            if self.job.problem is None:
                self._session.port.send(message.encode(self.job.attempts))
            elif message.keep_until_unix > 0:
                self._untold.append(message)

        self._command(tell)

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """Wait until all offered steps are durable (or staged), say good-bye, end the thread. Safe to call twice.

        With `wait_for=STAGED` the flusher finishes the rest alone. A late step is logged, not lost.
        """
        if not self._closed:
            self._closed = True
            last_transfers = LastTransfers(self.job, self._accepted, self._clock)
            last_transfers.wait(wait_for, seconds_max)
        # Also in a second close() after an exception: until the thread ends, the port is the thread's alone.
        self.leave()
        self._thread.join(2 * _LEAVE_SECONDS_MAX)
        self._not_at_exit()
        if self._thread.is_alive():
            _log.error(
                "rank %d waited %g s until its last messages to the stager were sent; the process ends without them",
                self.job.rank,
                2 * _LEAVE_SECONDS_MAX,
            )

    def leave(self) -> None:
        """Have the thread say good-bye and end; `close` waits for it."""

        def leave() -> None:
            self._leaving = True

        self._command(leave)

    def lose(self, error: HoldfastError) -> None:
        """Leave the stager, and treat it as lost; then try to reach it again as usual. Any thread."""

        def lose() -> None:
            if self.job.problem is None:
                # The stager is alive, and would wait for this rank.
                self._session.port.leave(0.0, lost=True)
            self._lose(error)

        self._command(lose)

    def close_at_exit(self) -> None:
        """Close the link at exit: a script without `close` must not leave the stager waiting for this rank."""
        close = partial(self.close, wait_for=TransferState.STAGED, seconds_max=_EXIT_SECONDS_MAX)
        self._not_at_exit = at_exit(close)

    def _command_if_alive(self, command: Callable[[], None]) -> None:
        """Queue `command` for the link's thread, which drops it if the stager is lost by then."""
        if self.job.problem is None:
            self._command(lambda: command() if self.job.problem is None else None)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._backoff.wake()
        if self._is_dead:
            self._obey()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._leaving:
            try:
                busy = self._turn()
            except ThreadDied as error:  # of a thread of the port
                self._break(error)
                busy = True
            except HoldfastError as error:
                self._lose(error)
                busy = True
            except Exception as error:  # noqa: BLE001 - a bug here must not leave the stager waiting for this rank
                self._break(thread_died(error, rank=self.job.rank, name=self._thread.name, task=_TASK))
                busy = True
            if busy:
                self._backoff.busy()
            else:
                self._backoff.rest(fetching=self._session.requests.fetching)
        if self._rejoining is not None:
            self._rejoining.end()
        self._session.outbox.close()
        self._held.give_up(PeerLost(f"rank {self.job.rank}: the link was closed while the stager was lost"))
        self._session.requests.end(self.job.problem or PeerLost(f"rank {self.job.rank}: the link is closed"))
        lost = isinstance(self.job.problem, PeerLost) and not isinstance(self.job.problem, ThreadDied)
        self._session.port.leave(0.0 if self.job.problem else _LEAVE_SECONDS_MAX, lost=lost)

    def _turn(self) -> bool:
        """Poll everything once; return whether anything had happened."""
        busy = self._obey()
        if self.job.problem is not None:  # the session is not used any more
            return self._look_for_stager() or busy
        messages = self._session.port.poll()
        self._session.silence.note(bool(messages))
        for message in messages:
            self._inbox.take(self._session, wire.decode(message))
        busy |= self._session.outbox.pump()
        return busy or bool(messages)

    def _obey(self) -> bool:
        """Run the queued commands; return whether there were any."""
        busy = False
        while self._commands:
            try:
                command = self._commands.popleft()
            except IndexError:  # once this thread is dead, two others may run this
                break
            busy = True
            command()
        return busy

    def _break(self, error: ThreadDied) -> None:
        """Leave the stager after a bug in this thread; the stager tells the other ranks."""
        if self.job.problem is None:
            with contextlib.suppress(Exception):  # the port itself may be what is broken
                self._session.port.leave(0.0)
        self._give_up(error)

    def _died(self, error: ThreadDied) -> None:
        """Give up after an exception has ended the thread."""
        self._is_dead = True
        try:
            self._break(error)
        finally:
            self.job.problem = self.job.problem or error
            self._held.give_up(error)
            if self.is_awaited:
                self._await_no_more(error)
            self._obey()

    def _begin(self, active: Outgoing) -> None:
        if self.job.problem is None:
            self._session.outbox.begin(active)
            return
        active.transfer.reach(TransferState.DECLINED, Reason.of_error(self.job.problem))
        active.release()

    def _lose(self, error: HoldfastError) -> None:
        """Give the stager up. Try to reach its next process, unless the error needs a person."""
        is_gone = isinstance(error, PeerLost) and not isinstance(error, (ThreadDied, StartReplaced))
        if self.job.problem is None and is_gone and self._rejoining is not None:
            self._session.port.leave(0.0, lost=True)
            self._give_up(error, comes_again=True)
            self._rejoining.begin(self._session.welcome)
        else:
            self._give_up(error)

    def _give_up(self, error: HoldfastError, *, comes_again: bool = False) -> None:
        if self.job.problem is not None:
            return
        what = f"{self.name} is lost"
        if isinstance(error, ThreadDied):
            what = f"the link to {self.name} is broken"
        if self._kept_there and comes_again:
            means = f"nothing goes to it until it is reached again; training goes on, and {self._kept_there}"
        elif self._kept_there:
            means = f"nothing more of this job goes to it; training goes on, and {self._kept_there}"
        elif comes_again:
            means = "no checkpoints are taken until it is reached again; training goes on"
        else:
            means = "no more checkpoints are taken in this job; training goes on"
        _log.error("rank %d: %s, and %s: %s", self.job.rank, what, means, error)
        self._events.emit("stager_lost", {"code": error.code, "message": str(error)})
        # After log and event: a thread that sees the stager lost finds both.
        self.is_awaited = comes_again and not self._kept_there
        self._awaited_until = self._clock() + LOST_STAGER_SECONDS_MAX
        self.job.lose(error)
        self.on_lost(error)
        self._inbox.end()
        # With tiers a held step would keep its memory, perhaps a slot, from the next steps, which the tiers can take.
        held = self._session.outbox.lose(error, comes_again=comes_again and not self._kept_there)
        self._held.hold(held, error)
        self._session.requests.end(error)

    def _await_no_more(self, error: HoldfastError) -> None:
        self.is_awaited = False
        self.on_lost(error)

    def _look_for_stager(self) -> bool:
        """Open a session once the stager is reached again; return whether it is."""
        self._held.look()
        if self.is_awaited and self._clock() > self._awaited_until:
            assert self.job.problem is not None
            self._await_no_more(self.job.problem)
        try:
            found = None if self._rejoining is None else self._rejoining.look()
        except ThreadDied as died:
            self.job.problem, self._rejoining = died, None
            self._held.give_up(died)
            self._await_no_more(died)
            return True
        if found is None:
            return False
        before, welcome = self._session.welcome, found.greeted.welcome
        if not welcome.ring or (welcome.attempt, welcome.ring) != (before.attempt, before.ring):
            self._held.give_up(PeerLost(f"{self.name} was lost, and with it the ring or the attempt"))
        self.job.join_again(welcome.attempt)
        self._session = self._open(found.greeted)
        self._backoff.outbox = self._session.outbox
        reach(Point.REJOINED)
        attempt = self.job.attempt
        self._events.emit("stager_back", {"seconds": found.seconds, "tries": found.tries, "attempt": attempt})
        _log.warning(
            "rank %d: %s is reached again after %.0f s and %d tries, and this job is attempt %d from now on; "
            "the next save goes to it",
            self.job.rank,
            self.name,
            found.seconds,
            found.tries,
            attempt,
        )
        self.is_awaited = False
        passed = self._newest_step  # the training thread offers the next one as soon as `problem` is cleared
        # After log and event: a thread that sees the link alive finds both.
        self.job.recover()
        # In the order of their steps. Ranks reconnect one by one: end at once a step of the others that this rank has
        # passed without a stager.
        newest = self.job.durable_step
        for newest, again in self._held.take():
            if again is None:
                self._decline_passed(newest)
            else:
                self._session.outbox.begin(again)
        if passed > newest:
            self._decline_passed(passed)
        self.on_back()
        untold, self._untold = self._untold, []
        for message in untold:
            if message.keep_until_unix > time.time():
                self._session.port.send(message.encode(self.job.attempts))
        return True
