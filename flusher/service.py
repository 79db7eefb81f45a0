"""The flusher's event loop: one stager at a time, until there is nothing left to do.

    wait for a stager ─► serve ──finish──────────► drain ─► drained ─► end, or wait for the next (linger)
                           └──stager gone─► settle ─► drain ─► grace ─► end, or the next stager attaches
    SIGTERM at any time ─► give up what is partial, publish what is staged, end

Draining is nothing special: the engine and the upkeep become idle. The loop sleeps in one `select` over the stager's
socket, the listening socket and the threads' inbox.
"""

from __future__ import annotations

import logging
import platform
import selectors
import signal
import time
from types import FrameType

from flusher.engine import Engine
from flusher.stager_desk import StagerDesk
from flusher.steps import Key
from flusher.tenure import Tenure
from flusher.upkeep import ReadBack, Upkeep
from flusher.workers import Inbox
from holdfast.config import FlusherConfig
from holdfast.errors import FencedError, HoldfastError, PeerLost, ProtocolError
from holdfast.events import EventLog
from holdfast.ipc import Listener
from holdfast.manifest import Manifest
from holdfast.ring import Ring
from holdfast.storage.base import Store

__all__ = ["Service"]

_log = logging.getLogger("holdfast.flusher")
_FIRST_STAGER_SECONDS_MAX = 120.0  # a stager that started us and died must not leave us here for ever
_LAST_WORDS_SECONDS_MAX = 5.0


class Service:
    """Serves stagers.

    Args:
        config: The settings.
        ring: The ring, new.
        store: The run.
        tenure: The claim on it.
        upkeep: Verification and retention. `inbox`: where it and the engine's threads answer.
        listener: Where stagers connect.
        events: The event log.
    """

    def __init__(
        self,
        config: FlusherConfig,
        ring: Ring,
        store: Store,
        tenure: Tenure,
        *,
        upkeep: Upkeep,
        inbox: Inbox,
        listener: Listener,
        events: EventLog,
    ) -> None:
        self._config, self._ring, self._store, self._tenure = config, ring, store, tenure
        self._upkeep, self._inbox, self._listener, self._events = upkeep, inbox, listener, events
        self._engine = Engine(
            ring, store, tenure, upkeep, inbox, events, writers=config.writers, listener=_Relay(self)
        )
        self._desk: StagerDesk | None = None
        self._stagers = 0
        self._drained_said = False
        self._look_again = False
        self._terminating = False
        self._ends_at: float | None = time.monotonic() + _FIRST_STAGER_SECONDS_MAX
        self._selector = selectors.DefaultSelector()

    @property
    def desk(self) -> StagerDesk | None:
        """The attached stager, if there is one."""
        return self._desk

    def run(self) -> None:
        """Serve until all is done.

        Raises:
            FencedError: Another writer took the run over. What was staged is its business now.
        """
        before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)
        }
        self._tenure.start_beating(self._inbox.put)
        self._selector.register(self._inbox, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while self._turn():
                self._selector.select(self._wait_seconds())
            self._say_last_words()
        except FencedError as error:
            self._events.emit("fenced", {"message": str(error)})
            if self._desk is not None:
                self._desk.refuse(error)
            raise
        finally:
            self._engine.stop()
            if self._desk is not None:
                self._desk.channel.close()
            self._selector.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- one turn ------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Do all that can be done now; False when it is over."""
        upkeep_was_idle = self._upkeep.idle  # before the inbox is emptied: its last words are then in it
        self._engine.turn()
        self._hear()
        self._accept()
        if self._terminating:
            self._give_up_partial()
        upkeep_is_idle = self._upkeep.idle
        # It may have ended after the first look, and its last word been taken above: nothing would wake the loop again.
        self._look_again = upkeep_is_idle and not upkeep_was_idle
        drained = upkeep_was_idle and self._engine.idle and upkeep_is_idle
        if drained and self._desk is not None and self._desk.finishing and not self._drained_said:
            self._desk.channel.send("drained")
            self._events.emit("drained")
            self._drained_said = True
            if not self._config.linger:
                return False
        self._watch_writable()
        return not (drained and self._is_over())

    def _is_over(self) -> bool:
        """Whether, with nothing left to do, nobody is expected any more."""
        if self._terminating:
            return True
        if self._desk is not None or self._config.linger or self._ends_at is None:
            return False
        return time.monotonic() >= self._ends_at

    def _wait_seconds(self) -> float | None:
        if self._look_again:
            return 0.0
        waits = [self._engine.wait_seconds()]
        if self._desk is None and self._ends_at is not None and not self._config.linger:
            left_seconds = self._ends_at - time.monotonic()
            if left_seconds > 0:  # later than that, only the end of the drain matters, and the inbox tells it
                waits.append(left_seconds + 0.001)
        return min((wait for wait in waits if wait is not None), default=None)

    def _hear(self) -> None:
        desk = self._desk
        if desk is None:
            return
        try:
            if not desk.hear(self._engine):
                self._welcome(desk)
        except ProtocolError as error:
            _log.error("stager (process %d): %s; taken for lost", desk.channel.peer_pid, error)
            self._events.emit("stager_refused", {"message": str(error)})
            self._forget_channel(desk)
            desk.refuse(error)
        if desk.channel.closed:
            self._stager_gone(desk)

    def _accept(self) -> None:
        busy = ""
        if self._desk is not None:
            busy = (
                f"{self._store.url}: process {self._desk.channel.peer_pid} on {platform.node()} is already the stager "
                "of this run. Wait for it or end it; each run has one"
            )
        elif self._terminating:
            busy = "this flusher was told to end"
        channel = self._listener.accept(busy=busy)
        if channel is None:
            return
        self._desk = StagerDesk(channel, self._ring, self._store.url)
        self._drained_said = False
        self._selector.register(channel, selectors.EVENT_READ)
        self._hear()  # hello may be there already

    def _welcome(self, desk: StagerDesk) -> None:
        try:
            if self._stagers:
                self._ring.set_attempt(self._tenure.renew())
        except FencedError:
            raise
        except HoldfastError as error:
            self._forget_channel(desk)
            desk.refuse(error)
            return
        self._stagers += 1
        self._ends_at = None
        desk.welcome()
        self._events.emit("stager_attached", {"pid": desk.channel.peer_pid, "attempt": self._ring.attempt})
        desk.hear(self._engine)

    def _stager_gone(self, desk: StagerDesk) -> None:
        self._forget_channel(desk)
        self._desk = None
        if desk.welcomed:
            desk.settle(self._engine)
            grace_seconds = 0.0 if desk.finishing else self._config.grace_seconds
            self._ends_at = time.monotonic() + grace_seconds
            self._events.emit("stager_gone", {"pid": desk.channel.peer_pid, "finished": desk.finishing})
        elif self._ends_at is None:
            self._ends_at = time.monotonic() + self._config.grace_seconds

    def _forget_channel(self, desk: StagerDesk) -> None:
        """Stop watching it. A closed socket has already left the selector's kernel side; its key has not."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is desk.channel:
                self._selector.unregister(desk.channel)

    def _watch_writable(self) -> None:
        if self._desk is None:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._desk.channel.unsent else 0)
        if self._selector.get_key(self._desk.channel).events != wanted:
            self._selector.modify(self._desk.channel, wanted)

    # -- ending --------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._terminating = True
        self._inbox.put(None)  # wakes the loop

    def _give_up_partial(self) -> None:
        reason = "this flusher was told to end (SIGTERM)"
        self._upkeep.stop()
        if self._desk is not None:
            self._desk.refuse_begins = reason
        self._engine.abort_receiving(PeerLost(reason))

    def _say_last_words(self) -> None:
        until = time.monotonic() + _LAST_WORDS_SECONDS_MAX
        while self._desk is not None and self._desk.channel.unsent and time.monotonic() < until:
            self._watch_writable()
            self._selector.select(0.1)
            self._desk.channel.flush()


class _Relay:
    """Passes on to whichever stager is attached when it happens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def began(self, key: Key, part_chunks: int) -> None:
        if self._service.desk is not None:
            self._service.desk.began(key, part_chunks)

    def freed(self, slots: tuple[int, ...]) -> None:
        if self._service.desk is not None:
            self._service.desk.freed(slots)

    def durable(self, key: Key, manifest: Manifest) -> None:
        if self._service.desk is not None:
            self._service.desk.durable(key, manifest)

    def read_back(self, result: ReadBack) -> None:
        if self._service.desk is not None:
            self._service.desk.read_back(result)

    def failed(self, key: Key, error: HoldfastError) -> None:
        if self._service.desk is not None:
            self._service.desk.failed(key, error)
