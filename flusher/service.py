"""The flusher's event loop: one stager at a time, until there is nothing left to do.

    wait for a stager ─► serve ──finish──────────► drain ─► drained ─► end, or wait for the next (linger, keeper)
                           └──stager gone─► dead ─► settle ─► drain ─► grace ─► end, or the next stager attaches
                                            ├ alive: wait until it is dead, or reconnects
                                            └ one of several: wait for its next process before giving up unstaged steps
    kept by `holdfast run` (holdfast/ring/ring_keeper.py): only a signal ends it, until the keeper is gone
    a signal at any time (SIGTERM, SIGINT, SIGHUP) ─► publish what is staged, leave the rest in the ring, end

Draining needs no code: engine and maintenance become idle. The loop sleeps in one `select` over the stager's socket,
the listening socket and the threads' inbox.
"""

from __future__ import annotations

import logging
import platform
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType

from flusher.engine import Engine
from flusher.flusher_context import FlusherContext
from flusher.listener import FlushListener
from flusher.recovery import adopt_staged, resolve_checkpoints
from flusher.stager_handler import StagerHandler
from flusher.verify_and_prune import Maintenance
from holdfast.config import FlusherConfig
from holdfast.errors import BusyError, FencedError, HoldfastError, PeerLost, ProtocolError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from holdfast.process import ENDING_SIGNALS
from holdfast.ring.doorbell import Listener
from holdfast.ring.ring import Ring
from holdfast.ring.ring_keeper import is_ring_kept
from holdfast.store.concurrency import write_limit

_log = logging.getLogger("holdfast.flusher")
_FIRST_STAGER_SECONDS_MAX = 120.0  # a stager that started us and died must not leave us here for ever
_OLD_STAGER_SECONDS_MIN = 30.0  # a live stager reconnects at once, but its machine may be busy
_HANG_CHECK_SECONDS = 5.0  # while a stager is alive but silent
# the kernel may close the socket of a dead process a moment before it releases the process's lock on the ring
_DYING_SECONDS = 0.2
_FINAL_SEND_SECONDS_MAX = 5.0
_KEEPER_CHECK_SECONDS = 0.3


class FlusherService:
    """Serves stagers.

    Args:
        adopted: Whether the ring was left by a dead flusher, so that a stager may still have it mapped.

    Attributes:
        leaves_ring: Whether it was told to end while checkpoints in the ring, or a stager, still need the ring.
    """

    def __init__(
        self,
        config: FlusherConfig,
        ring: Ring,
        context: FlusherContext,
        *,
        maintenance: Maintenance,
        listener: Listener,
        request_room: Callable[[int], bool] = lambda _: False,
        adopted: bool = False,
    ) -> None:
        self._config, self._ring, self._maintenance, self._listener = config, ring, maintenance, listener
        self._store, self._lease = context.store, context.lease
        self._inbox, self._events = context.inbox, context.events
        self._engine = Engine(
            ring,
            context,
            maintenance,
            writers=write_limit(config.store, config.writers),
            request_room=request_room,
        )
        self._handler: StagerHandler | None = None
        self._is_ours = not adopted  # the ring has the lease's attempt, and no stager has used it
        self._waits_for_old_stager = adopted
        self._is_standing = False  # the old one, or the one that is there
        self._awaits_next_stager = False  # the old one is dead
        self._grace_after_wait_seconds = 0.0
        self._adopted = adopted
        self._drained_sent = False
        self._run_again = False
        self._kept = False  # by the last look, made when it would have ended
        self._terminating = False
        self.leaves_ring = False
        self._warned_of_hang = False
        wait_seconds = _FIRST_STAGER_SECONDS_MAX
        if adopted:
            wait_seconds = max(_OLD_STAGER_SECONDS_MIN, config.grace_seconds)
        self._ends_at: float | None = time.monotonic() + wait_seconds
        self._selector = selectors.DefaultSelector()

    def end_orphans(self, keys: Iterable[CheckpointId]) -> None:
        """Publish checkpoints of stagers that are gone, once all their shares are sealed. Call before `run`."""
        self._engine.end_orphans(keys)

    def run(self) -> None:
        """Serve until nothing is left to do. Raises `FencedError`: another writer took the run over, with its staged
        steps.
        """
        before = {number: signal.signal(number, self._on_signal) for number in ENDING_SIGNALS}
        self._lease.start_heartbeat(self._inbox.put)
        self._selector.register(self._inbox, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            self._engine.load_doubts()  # marks of an earlier job may be missing
            self._engine.load_proofs()
            if self._adopted:
                for key in adopt_staged(self._engine, self._ring):
                    self._events.emit("recovered", {"attempt": key.attempt}, step=key.step)
            while self._run_once():
                self._selector.select(self._wait_seconds())
            self._decide_ring_handover()
            self._flush_messages()
        except FencedError as error:
            self._events.emit("fenced", {"message": str(error)})
            if self._handler is not None:
                self._handler.refuse(error)
            raise
        finally:
            self._engine.stop()
            if self._handler is not None:
                self._handler.channel.close()
            self._selector.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- one turn ------------------------------------------------------------------------------------------------

    def _run_once(self) -> bool:
        """Do all that can be done now; return False when it is over."""
        # Read before the inbox is emptied, so that the last messages of maintenance are in it
        maintenance_was_idle = self._maintenance.idle
        self._engine.run_once()
        self._poll_stager()
        self._accept()
        self._give_up_waiting()
        if self._terminating:
            self._stop_accepting_work()
        self._end_if_held()
        if self._handler is not None:
            self._handler.send_held(self._engine.failure_reason)
        maintenance_is_idle = self._maintenance.idle
        # If it became idle in between, its last message was taken above, and nothing would wake the loop again.
        self._run_again = maintenance_is_idle and not maintenance_was_idle
        # Without a stager nobody waits for the outcome of a sealed share.
        idle = self._engine.idle if self._handler is not None else self._engine.only_sealed
        done = self._engine.only_receiving if self._terminating else idle
        drained = maintenance_was_idle and done and maintenance_is_idle
        if drained and self._handler is not None and self._handler.finishing and not self._drained_sent:
            self._handler.channel.send("drained")
            self._events.emit("drained")
            self._drained_sent = True
            if not self._config.linger and not self._is_kept():
                return False
        self._watch_writable()
        return not (drained and self._is_over())

    def _is_over(self) -> bool:
        """Whether an idle flusher has nobody left to wait for."""
        if self._terminating:
            return True
        if self._handler is not None or self._config.linger or self._ends_at is None:
            return False
        return time.monotonic() >= self._ends_at and not self._is_kept()

    def _is_kept(self) -> bool:
        self._kept = is_ring_kept(self._ring.directory)
        return self._kept

    def _wait_seconds(self) -> float | None:
        if self._run_again:
            return 0.0
        waits = [self._engine.wait_seconds()]
        if self._handler is None and self._kept:
            waits.append(_KEEPER_CHECK_SECONDS)
        refusal = self._store_refusal()
        if self._handler is None and refusal is not None:
            left_seconds = self._config.held_seconds_max - refusal[0]
            if left_seconds > 0 or not self._kept:
                waits.append(max(0.0, left_seconds) + 0.001)
        waiting = self._waits_for_old_stager or not self._config.linger
        if self._handler is None and self._ends_at is not None and waiting:
            left_seconds = self._ends_at - time.monotonic()
            if left_seconds > 0:  # after that only the end of the drain matters, which wakes the inbox
                waits.append(left_seconds + 0.001)
        return min((wait for wait in waits if wait is not None), default=None)

    def _poll_stager(self) -> None:
        handler = self._handler
        if handler is None:
            return
        try:
            if not handler.poll(self._engine):
                self._welcome(handler)
        except ProtocolError as error:
            _log.error("the stager (process %d) is taken for lost: %s", handler.channel.peer_pid, error)
            self._events.emit("stager_refused", {"message": str(error)})
            self._forget_channel(handler)
            handler.refuse(error)
        if handler.has_begun:
            self._lease.begin_work()
        if handler.finishing:
            self._lease.end_work(lost=handler.interrupted)
        if handler.channel.closed:
            self._on_stager_disconnected(handler)

    def _accept(self) -> None:
        busy = ""
        if self._handler is not None:
            busy = (
                f"{self._store.url}: process {self._handler.channel.peer_pid} on {platform.node()} is already the "
                "stager of this run. Wait for it or end it; each run has one"
            )
        elif self._terminating:
            busy = "this flusher was told to end"
        channel = self._listener.accept(busy=busy)
        if channel is None:
            return
        self._handler = self._engine.listener = StagerHandler(
            channel, self._ring, self._store.url, self._config.share
        )
        self._drained_sent = False
        self._selector.register(channel, selectors.EVENT_READ)
        self._poll_stager()  # hello may have arrived already

    def _welcome(self, handler: StagerHandler) -> None:
        resumed = self._waits_for_old_stager and handler.attempt == self._ring.attempt
        # The next process of a stager of several. Only as long as it is waited for: after that its steps are given up.
        is_waited_for = self._waits_for_old_stager and handler.lead_attempt == self._ring.attempt
        continues = is_waited_for and not resumed
        try:
            handler.check_share()
            if not resumed:
                self._check_old_stager_exited()
                if continues:
                    resolve_checkpoints(
                        self._engine, self._ring, "another stager came", keep_attempt=self._ring.attempt
                    )
                else:
                    self._end_waiting("its stager did not come back: another job began")
                if not (continues and self._config.share.is_lead):
                    self._set_attempt(handler.lead_attempt or handler.attempt)
                self._ring.record_writers(self._ring.attempt, self._config.share.writers)
        except FencedError:
            raise
        except HoldfastError as error:
            self._forget_channel(handler)
            handler.refuse(error)
            return
        self._is_standing = handler.standing
        self._is_ours = self._waits_for_old_stager = self._awaits_next_stager = self._kept = False
        self._ends_at = None
        if (resumed or continues) and self._ring.attempt < self._lease.attempt:  # its previous flusher died
            self._lease.resume_work()
        seen = self._lease.prior_failures
        handler.welcome(seen, resumed=resumed)
        if continues:
            self._engine.repeat_durable(self._ring.attempt)
        fields = {
            "pid": handler.channel.peer_pid,
            "attempt": self._ring.attempt,
            "resumed": resumed,
            "failures": seen.failures,
            "seen_seconds": round(seen.seconds, 3),
        }
        self._events.emit("stager_attached", fields)
        handler.poll(self._engine)

    def _set_attempt(self, lead_attempt: int) -> None:
        """Give the ring to another job. `lead_attempt`: its attempt, where another flusher leads."""
        if not self._config.share.is_lead:
            if lead_attempt < self._ring.attempt:
                raise ProtocolError(
                    f"{self._store.url}: a stager of attempt {lead_attempt} connects to the flusher of share "
                    f"{self._config.share} after one of attempt {self._ring.attempt}; its job is over, end it"
                )
            self._ring.set_attempt(lead_attempt)
            self._engine.begin_attempt()
        elif not self._is_ours:
            attempt = self._lease.attempt
            self._ring.set_attempt(attempt if attempt > self._ring.attempt else self._lease.renew())

    def _on_stager_disconnected(self, handler: StagerHandler) -> None:
        self._forget_channel(handler)
        self._handler, self._engine.listener = None, FlushListener()
        if handler.welcomed:
            self._events.emit("stager_gone", {"pid": handler.channel.peer_pid, "finished": handler.finishing})
            if not handler.finishing and self._ring.is_held():
                # Its process is alive, only the connection is closed. It reconnects with the same attempt; until then,
                # or until it dies, the slots that it fills are its own.
                self._waits_for_old_stager, self._warned_of_hang = True, False
                self._grace_after_wait_seconds = self._config.grace_seconds
                self._ends_at = time.monotonic() + _DYING_SECONDS
                return
            why = f"the stager (process {handler.channel.peer_pid}) ended"
            if not handler.finishing and self._keep_share(why):
                return
            self._lease.end_work(lost=True)
            resolve_checkpoints(self._engine, self._ring, why)
            grace_seconds = 0.0 if handler.finishing else self._config.grace_seconds
            self._ends_at = time.monotonic() + grace_seconds
        elif self._ends_at is None:
            self._ends_at = time.monotonic() + self._config.grace_seconds

    def _keep_share(self, why: str) -> bool:
        """Keep unstaged checkpoints for the next stager of this share and attempt; return whether there are any. The
        lead's next process must also continue the attempt if only another share is missing. Under MPI, no stager is
        started again.
        """
        if self._config.share.writers == 1 or self._terminating or not self._is_standing:
            return False
        attempt, engine = self._ring.attempt, self._engine
        resolve_checkpoints(engine, self._ring, why, keep_attempt=attempt)
        receiving = engine.receiving()
        names = [key for key in self._ring.checkpoint_ids() if key.attempt == attempt]
        if not self._config.share.is_lead:
            names = [key for key in names if not engine.knows(key) or key in receiving]
        if not names:
            return False
        self._waits_for_old_stager = self._awaits_next_stager = True
        self._grace_after_wait_seconds = max(0.0, self._config.grace_seconds - LOST_STAGER_SECONDS_MAX)
        self._ends_at = time.monotonic() + LOST_STAGER_SECONDS_MAX
        return True

    def _forget_channel(self, handler: StagerHandler) -> None:
        """Stop watching a channel. The kernel has dropped a closed socket already; the selector still has its key."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is handler.channel:
                self._selector.unregister(handler.channel)

    def _watch_writable(self) -> None:
        if self._handler is None:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._handler.channel.unsent else 0)
        if self._selector.get_key(self._handler.channel).events != wanted:
            self._selector.modify(self._handler.channel, wanted)

    # -- ending --------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._terminating = True
        self._inbox.put(None)  # wakes the loop

    def _give_up_waiting(self) -> None:
        """Stop waiting for the ring's stager once its time is up."""
        if not self._waits_for_old_stager or self._handler is not None:
            return
        if self._ends_at is None or time.monotonic() < self._ends_at:
            return
        if self._ring.is_held():
            # The stager hangs. Its slots cannot be reused: it may still write into them.
            if not self._warned_of_hang:
                _log.warning(
                    "the stager of attempt %d does not answer, but its process is alive; waiting for it",
                    self._ring.attempt,
                )
                self._warned_of_hang = True
            self._ends_at = time.monotonic() + _HANG_CHECK_SECONDS
            return
        if not self._awaits_next_stager and self._keep_share("its stager ended"):
            return
        self._end_waiting("its stager ended, and no stager came back")
        self._ends_at, self._grace_after_wait_seconds = time.monotonic() + self._grace_after_wait_seconds, 0.0

    def _check_old_stager_exited(self) -> None:
        if self._waits_for_old_stager and self._ring.is_held():
            raise BusyError(
                f"{self._store.url}: the stager of attempt {self._ring.attempt} of this run still uses the ring, but "
                f"does not answer (`fuser {self._ring.directory}/ring` on {platform.node()} names its process). Wait "
                "for it or end it; a run can have only one stager"
            )

    def _end_waiting(self, why: str) -> None:
        if self._waits_for_old_stager:
            self._waits_for_old_stager = False
            self._lease.end_work(lost=True)
            resolve_checkpoints(self._engine, self._ring, why)

    def _end_if_held(self) -> None:
        """Leave the ring to the next flusher when the store takes no writes and waiting is pointless."""
        refusal = self._store_refusal()
        if refusal is None or (self._handler is not None and not self._terminating):
            return
        waited_seconds, error = refusal
        if self._terminating or (waited_seconds >= self._config.held_seconds_max and not self._is_kept()):
            why = "told to end" if self._terminating else f"nothing succeeded for {waited_seconds:.0f} s"
            raise StoreError(
                f"{error} ({why}). Nothing is lost: staged checkpoints stay in {self._ring.directory}; fix the "
                f"store, then run `holdfast flusher --store {self._store.url}` to publish them"
            )

    def _store_refusal(self) -> tuple[float, HoldfastError] | None:
        """Return for how many seconds the store has refused all remaining work, and why; None while not."""
        error = self._engine.held_error
        if error is not None:
            return self._engine.held_seconds(), error
        return self._maintenance.marks.store_refusal if self._engine.idle else None

    def _stop_accepting_work(self) -> None:
        """Finish after a signal: staged checkpoints are still published. A checkpoint being received may become staged
        at any moment, so it stays in the ring, as after a crash, and the next flusher continues it.
        """
        reason = "this flusher was told to end"
        if self._waits_for_old_stager and not self._ring.is_held():
            self._end_waiting(reason)
        self._maintenance.stop()
        if self._handler is not None:
            self._handler.refuse_begins = reason
        self._engine.abort_stranded(PeerLost(f"{reason}, and its upload cannot be resumed"))

    def _decide_ring_handover(self) -> None:
        finishing = self._handler is not None and self._handler.finishing
        wanted = bool(self._ring.checkpoint_ids()) or (self._ring.is_held() and not finishing)
        wanted = wanted or self._maintenance.marks.is_pending
        self.leaves_ring = self._terminating and wanted
        if self.leaves_ring:
            _log.warning(
                "this flusher was told to end; the next flusher takes over the ring in %s",
                self._ring.directory,
            )
            self._events.emit("ring_left", {"receiving": len(self._engine.receiving())})

    def _flush_messages(self) -> None:
        until = time.monotonic() + _FINAL_SEND_SECONDS_MAX
        while self._handler is not None and self._handler.channel.unsent and time.monotonic() < until:
            self._watch_writable()
            self._selector.select(0.1)
            self._handler.channel.flush()
