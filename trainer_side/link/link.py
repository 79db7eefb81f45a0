"""The link to the stager: the thread of a training rank that exchanges messages with the stager after start-up.

    training thread      agree, offer, decline, send_message, close ──► commands ─┐
    copy thread          SliceSource.is_ready(frame) ─────────────────────────────┤
                                                                                  ▼
    this thread          commands · messages · send frames that are credited and copied · deadlines · pause

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
from holdfast.ring.remains import FetchKind
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.background_thread import BackgroundThread, ThreadDied, thread_died
from trainer_side.link.greeting import GreetedStager
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

_DISCONNECT_SECONDS_MAX = 5.0
_EXIT_SECONDS_MAX = 10.0
_TASK = "exchanges messages with the stager"


class Link:
    """A `ToStager` for one stager. Methods belong to the training thread unless they say otherwise.

    `reconnect`: How to reach a lost stager again; None: it stays lost.

    Attributes:
        on_lost, on_recovered: Called in the link's thread, right after `job` notes that the stager is lost, or back;
            `on_lost` again once `is_awaited` ends without it.
        is_awaited: The stager is lost, and its next process may still continue its attempt.
        name: The stager's name in the log.
    """

    def __init__(
        self,
        config: TrainerConfig,
        greeted: GreetedStager,
        inbox: ShareInbox,
        events: EventLog,
        *,
        rank: int,
        reconnect: Reconnect | None = None,
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
            prior_failures=welcome.seen,
            clock=clock,
        )
        tiers = ", ".join(config.tiers)
        self._fallback_text = f"checkpoints are kept in {tiers} alone" if tiers else ""
        self.on_lost: Callable[[HoldfastError], None] = lambda _: None
        self.on_recovered: Callable[[], None] = lambda: None
        self.name = greeted.name
        self.is_awaited, self._awaited_until = False, 0.0
        self._plan: SendPlan | None = None
        self._newest_step = -1
        self._offered: list[Transfer] = []  # by the training thread, for close()
        self._commands: deque[Callable[[], None]] = deque()
        self._session = self._open_session(greeted)
        self._backoff = PollBackoff(self._session.outbox, clock, greeted.port.processes_per_core)
        self._rejoining: Rejoining | None = None
        if reconnect is not None:
            self._rejoining = Rejoining(
                reconnect,
                self.job,
                start_seconds_max=config.start_seconds_max,
                last_step=lambda: inbox.last_step,
                fallback_text=self._fallback_text,
            )
        self._held = HeldShares(clock)
        self._unsent_messages: list[StagerMessage] = []  # while the stager is lost
        self._leaving = self._has_thread_died = False
        self._closed = False
        self._cancel_at_exit: Callable[[], None] = lambda: None
        self._thread = BackgroundThread(
            "holdfast-link", self._run, rank=rank, task=_TASK, on_death=self._on_thread_death
        )
        self._thread.start()

    def _open_session(self, greeted: GreetedStager) -> StagerSession:
        return StagerSession(
            self._config, greeted, self.job, self._events, enqueue=self._enqueue, clock=self._clock
        )

    # -- commands of the training thread -------------------------------------------------------------------------

    def agree(self, proposal: Proposal, *, seconds_max: float | None = None) -> Agreement:
        return self._session.requests.agree(proposal, seconds_max)

    def fetch(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        return self._session.requests.fetch(fetch_kind, attempt=attempt, step=step, chunk=chunk, body=body)

    def offer(self, step: int, source: SliceSource, record: SaveRecord, layout: Layout) -> Transfer:
        transfer = Transfer(step, record)
        self.offer_transfer(transfer, source, layout)
        if not transfer.ended.is_set():
            self._offered = [other for other in self._offered if not other.ended.is_set()] + [transfer]
        return transfer

    def offer_transfer(
        self, transfer: Transfer, source: SliceSource, layout: Layout, chunks: range | None = None
    ) -> None:
        """Offer a checkpoint, of which the stager receives `chunks`; None: all. They stay the same for a layout."""
        step, problem = transfer.step, self.job.problem
        refusal = None if problem is None else Reason.from_error(problem)
        if problem is not None:
            self._newest_step = max(self._newest_step, step)
            # The link thread may have reached the stager, and read the newest step, since `problem` was read here.
            self._enqueue_if_alive(lambda: self._decline_missed(step))
        elif step <= self._newest_step:
            # Every rank applies this rule, so all ranks skip the step.
            refusal = DeclineCause.NOT_NEW.because(
                f"step {step} is not above step {self._newest_step}, which was saved or declined before"
            )
        if refusal is not None:
            transfer.set_state(TransferState.DECLINED, refusal)
            transfer.release()
            return
        self._newest_step = step
        if self._plan is None or self._plan.layout is not layout:
            self._plan = SendPlan.of(layout, self.job.rank, chunks)
        outgoing = Outgoing(transfer, source, self._plan)
        self._enqueue(lambda: self._offer(outgoing))

    def decline_reason(self, step: int) -> Reason | None:
        verdict = self._session.outbox.verdict(step)
        return None if verdict is None else Reason.from_body(wire.json_body(verdict))

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        self._newest_step = max(self._newest_step, step)

        def send() -> None:
            own = reason.with_rank(self.job.rank)
            if self.job.problem is not None:
                self._held.decline(step, own)
                return
            message = self._decline_message(step, reason.text, needed_pickle_bytes)
            self._session.outbox.decline(step, message, own)

        self._enqueue(send)

    def _decline_message(self, step: int, why: str, needed_pickle_bytes: int = 0) -> bytes:
        return wire.encode(
            Kind.DECLINE,
            attempt=self.job.attempt,
            step=step,
            arg=needed_pickle_bytes,
            body=why.encode()[:2000],
        )

    def _decline_missed(self, step: int) -> None:
        self._session.port.send(self._decline_message(step, "this rank had lost the stager"))

    def send_message(self, message: StagerMessage) -> None:
        def send() -> None:
            if self.job.problem is None:
                self._session.port.send(message.encode(self.job.attempts))
            elif message.keep_until_unix > 0:
                self._unsent_messages.append(message)

        self._enqueue(send)

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """Wait until all offered steps are durable (or staged), say good-bye, end the thread. Safe to call twice.

        With `wait_for=STAGED` the flusher finishes the rest alone. A late step is logged, not lost.
        """
        if not self._closed:
            self._closed = True
            last_transfers = LastTransfers(self.job, self._offered, self._clock)
            last_transfers.wait(wait_for, seconds_max)
        # Also in a second close() after an exception: until the thread ends, the port is the thread's alone.
        self.begin_close()
        self._thread.join(2 * _DISCONNECT_SECONDS_MAX)
        self._cancel_at_exit()
        if self._thread.is_alive():
            _log.error(
                "rank %d waited %g s until its last messages to the stager were sent; the process ends without them",
                self.job.rank,
                2 * _DISCONNECT_SECONDS_MAX,
            )

    def begin_close(self) -> None:
        """Have the thread say good-bye and end; `close` waits for it."""

        def leave() -> None:
            self._leaving = True

        self._enqueue(leave)

    def drop_stager(self, error: HoldfastError) -> None:
        """Leave the stager, and treat it as lost; then try to reach it again as usual. Any thread."""

        def drop() -> None:
            if self.job.problem is None:
                # The stager is alive, and would wait for this rank.
                self._session.port.disconnect(0.0, lost=True)
            self._handle_loss(error)

        self._enqueue(drop)

    def close_at_exit(self) -> None:
        """Close the link at exit: a script without `close` must not leave the stager waiting for this rank."""
        close = partial(self.close, wait_for=TransferState.STAGED, seconds_max=_EXIT_SECONDS_MAX)
        self._cancel_at_exit = at_exit(close)

    def _enqueue_if_alive(self, command: Callable[[], None]) -> None:
        """Queue `command` for the link's thread, which drops it if the stager is lost by then."""
        if self.job.problem is None:
            self._enqueue(lambda: command() if self.job.problem is None else None)

    def _enqueue(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._backoff.wake()
        if self._has_thread_died:
            self._run_commands()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._leaving:
            try:
                busy = self._poll_once()
            except ThreadDied as error:  # of a thread of the port
                self._abort(error)
                busy = True
            except HoldfastError as error:
                self._handle_loss(error)
                busy = True
            except Exception as error:  # noqa: BLE001 - a bug here must not leave the stager waiting for this rank
                self._abort(thread_died(error, rank=self.job.rank, name=self._thread.name, task=_TASK))
                busy = True
            if busy:
                self._backoff.reset()
            else:
                self._backoff.pause(is_fetching=self._session.requests.is_fetching)
        if self._rejoining is not None:
            self._rejoining.end()
        self._session.outbox.close()
        self._held.fail_all(PeerLost(f"rank {self.job.rank}: the link was closed while the stager was lost"))
        self._session.requests.fail_all(
            self.job.problem or PeerLost(f"rank {self.job.rank}: the link is closed")
        )
        lost = isinstance(self.job.problem, PeerLost) and not isinstance(self.job.problem, ThreadDied)
        self._session.port.disconnect(0.0 if self.job.problem else _DISCONNECT_SECONDS_MAX, lost=lost)

    def _poll_once(self) -> bool:
        """Poll everything once; return whether anything had happened."""
        busy = self._run_commands()
        if self.job.problem is not None:  # the session is not used any more
            return self._poll_rejoining() or busy
        messages = self._session.port.poll()
        self._session.silence.update(bool(messages))
        for message in messages:
            self._inbox.handle(self._session, wire.decode(message))
        busy |= self._session.outbox.pump()
        return busy or bool(messages)

    def _run_commands(self) -> bool:
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

    def _abort(self, error: ThreadDied) -> None:
        """Leave the stager after a bug in this thread; the stager tells the other ranks."""
        if self.job.problem is None:
            with contextlib.suppress(Exception):  # the port itself may be what is broken
                self._session.port.disconnect(0.0)
        self._mark_lost(error)

    def _on_thread_death(self, error: ThreadDied) -> None:
        """Give up after an exception has ended the thread."""
        self._has_thread_died = True
        try:
            self._abort(error)
        finally:
            self.job.problem = self.job.problem or error
            self._held.fail_all(error)
            if self.is_awaited:
                self._stop_awaiting(error)
            self._run_commands()

    def _offer(self, active: Outgoing) -> None:
        if self.job.problem is None:
            self._session.outbox.offer(active)
            return
        active.transfer.set_state(TransferState.DECLINED, Reason.from_error(self.job.problem))
        active.release()

    def _handle_loss(self, error: HoldfastError) -> None:
        """Give the stager up. Try to reach its next process, unless the error needs a person."""
        is_peer_lost = isinstance(error, PeerLost) and not isinstance(error, (ThreadDied, StartReplaced))
        if self.job.problem is None and is_peer_lost and self._rejoining is not None:
            self._session.port.disconnect(0.0, lost=True)
            self._mark_lost(error, will_rejoin=True)
            self._rejoining.begin(self._session.welcome)
        else:
            self._mark_lost(error)

    def _mark_lost(self, error: HoldfastError, *, will_rejoin: bool = False) -> None:
        if self.job.problem is not None:
            return
        what = f"{self.name} is lost"
        if isinstance(error, ThreadDied):
            what = f"the link to {self.name} is broken"
        if self._fallback_text and will_rejoin:
            consequence = (
                f"nothing goes to it until it is reached again; training goes on, and {self._fallback_text}"
            )
        elif self._fallback_text:
            consequence = f"nothing more of this job goes to it; training goes on, and {self._fallback_text}"
        elif will_rejoin:
            consequence = "no checkpoints are taken until it is reached again; training goes on"
        else:
            consequence = "no more checkpoints are taken in this job; training goes on"
        _log.error("rank %d: %s, and %s: %s", self.job.rank, what, consequence, error)
        self._events.emit("stager_lost", {"code": error.code, "message": str(error)})
        # After log and event: a thread that sees the stager lost finds both.
        self.is_awaited = will_rejoin and not self._fallback_text
        self._awaited_until = self._clock() + LOST_STAGER_SECONDS_MAX
        self.job.mark_lost(error)
        self.on_lost(error)
        self._inbox.on_stager_lost()
        # With tiers a held step would keep its memory, perhaps a slot, from the next steps, which the tiers can take.
        held = self._session.outbox.fail_or_hold(error, will_rejoin=will_rejoin and not self._fallback_text)
        self._held.hold(held, error)
        self._session.requests.fail_all(error)

    def _stop_awaiting(self, error: HoldfastError) -> None:
        self.is_awaited = False
        self.on_lost(error)

    def _poll_rejoining(self) -> bool:
        """Open a session once the stager is reached again; return whether it is."""
        self._held.fail_expired()
        if self.is_awaited and self._clock() > self._awaited_until:
            assert self.job.problem is not None
            self._stop_awaiting(self.job.problem)
        try:
            found = None if self._rejoining is None else self._rejoining.poll()
        except ThreadDied as died:
            self.job.problem, self._rejoining = died, None
            self._held.fail_all(died)
            self._stop_awaiting(died)
            return True
        if found is None:
            return False
        before, welcome = self._session.welcome, found.greeted.welcome
        if not welcome.ring or (welcome.attempt, welcome.ring) != (before.attempt, before.ring):
            self._held.fail_all(PeerLost(f"{self.name} was lost, and with it the ring or the attempt"))
        self.job.rejoin(welcome.attempt)
        self._session = self._open_session(found.greeted)
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
        newest_passed = (
            self._newest_step
        )  # the training thread offers the next one as soon as `problem` is cleared
        # After log and event: a thread that sees the link alive finds both.
        self.job.mark_recovered()
        # In the order of their steps. Ranks reconnect one by one: end at once a step of the others that this rank has
        # passed without a stager.
        newest = self.job.durable_step
        for newest, retried in self._held.drain():
            if retried is None:
                self._decline_missed(newest)
            else:
                self._session.outbox.offer(retried)
        if newest_passed > newest:
            self._decline_missed(newest_passed)
        self.on_recovered()
        unsent, self._unsent_messages = self._unsent_messages, []
        for message in unsent:
            if message.keep_until_unix > time.time():
                self._session.port.send(message.encode(self.job.attempts))
        return True
