"""The loop around the core: passes events to it and executes its actions. One thread, and one more for the fleet.

signals, the job's reports, event log, fleet, clock ─► Core ─► start, ask, terminate, kill the job; notes; the end
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.process import ENDING_SIGNALS
from holdfast.ring.ring_keeper import record_set_aside
from holdfast.telemetry.event_follower import Follower
from holdfast.telemetry.events import EventLog
from operator_side.supervise import supervisor_messages as messages
from operator_side.supervise.core import Core
from operator_side.supervise.flusher import KeptFlusher
from operator_side.supervise.hosts import Fleet, Host
from operator_side.supervise.job_output import parse_event
from operator_side.supervise.job_processes import JobProcesses, RunFiles
from operator_side.supervise.verdict import Verdict

_log = logging.getLogger("holdfast.run")

_POLL_SECONDS = 0.1
_DRAIN_SECONDS_MAX = 600.0  # to wait for the flusher at the end


class FleetWatch(threading.Thread):
    """Asks the fleet for its hosts in a thread of its own, at intervals and on request."""

    def __init__(self, fleet: Fleet, poll_seconds: float) -> None:
        super().__init__(name="fleet", daemon=True)
        self._fleet, self._poll_seconds = fleet, poll_seconds
        self._wake, self._is_ending = threading.Event(), False
        self.extra_slots = 0  # slots to request at each poll
        self._results: queue.SimpleQueue[tuple[Host, ...] | None] = queue.SimpleQueue()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def poll_now(self, extra_slots: int) -> None:
        """Poll now; request this many more slots from the fleet, now and at each later poll."""
        self.extra_slots = extra_slots
        self._wake.set()

    def fileno(self) -> int:
        """Readable when `drain_results` has something to yield."""
        return self._eventfd

    def drain_results(self) -> Iterator[tuple[Host, ...] | None]:
        """Yield the answers since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        while not self._results.empty():
            yield self._results.get()

    def stop(self) -> None:
        # Do not join: a poll in progress may block for a long network timeout.
        self._is_ending = True
        self._wake.set()

    def run(self) -> None:
        while True:
            self._wake.wait(self._poll_seconds)
            self._wake.clear()
            if self._is_ending:
                return
            try:
                if self.extra_slots:
                    self._fleet.request_hosts(self.extra_slots)
                self._results.put(self._fleet.list_hosts())
                os.eventfd_write(self._eventfd, 1)
            except HoldfastError as error:
                _log.warning("%s: %s; the hosts of the last look still count", self._fleet.name, error)
            except Exception:  # noqa: BLE001 - any error: the job must keep running
                _log.exception("%s: listing its hosts failed", self._fleet.name)


class Supervisor:
    """Runs a job until it is done, stopped, or not worth another attempt. Only for the main thread, because it handles
    signals. `watch`: started here. `final_check`: returns the final verdict once the flusher has ended.
    `on_event`: called with each event of the run; must return at once.
    """

    def __init__(
        self,
        core: Core,
        job: JobProcesses,
        watch: FleetWatch,
        files: RunFiles,
        *,
        final_check: Callable[[Verdict], Verdict],
        on_event: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._core, self._job, self._watch = core, job, watch
        self._rings = files.rings
        self._follower = Follower(files.events)
        self._final_check, self._on_event = final_check, on_event
        self._status = EventLog(files.logs / "status.jsonl", role="supervisor")
        self._signals: list[int] = []
        self._is_stopping = False  # a signal asked the run to end
        self._verdict: Verdict | None = None

    def run(self) -> Verdict:
        """Supervise until no process of the job is left. Raises `ConfigError`: the ring's folder is not safely ours."""
        flushers = [KeptFlusher(ring) for ring in self._rings]
        before = {
            number: signal.signal(number, self._on_signal) for number in (*ENDING_SIGNALS, signal.SIGUSR1)
        }
        self._watch.start()
        try:
            self._execute(self._core.begin())
            while self._verdict is None:
                self._poll_once()
            self._wait_for_flushers(flushers)
            verdict = self._final_check(self._verdict)
            fields = {"cause": verdict.cause.value, "exit_code": verdict.exit_code}
            self._note("over", verdict.message, fields, is_warning=verdict.exit_code != 0)
        finally:
            for flusher in flushers:
                flusher.release()
            self._job.close()
            self._watch.stop()
            self._status.close()
            self._follower.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return verdict

    # -- one poll --------------------------------------------------------------------------------------------------

    def _poll_once(self) -> None:
        self._job.wait(_POLL_SECONDS, self._watch.fileno())
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGUSR1:  # a notice, for the ranks that watch for it
                self._job.forward_signal(number)
                continue
            self._handle(messages.Stop(f"this command received {signal.Signals(number).name}"))
        reports, status = self._job.poll()
        for report in reports:
            self._handle(report)
        # Before handling mpirun's end: steps that became durable until then count as progress of this attempt.
        self._read_event_log()
        if status is not None:
            self._handle(messages.MpirunExited(status))
        for hosts in self._watch.drain_results():
            self._handle(messages.HostsSeen(hosts))
        self._handle(messages.ClockTick())

    def _read_event_log(self) -> None:
        for line in self._follower.read():
            self._on_event(line)
            event = parse_event(line)
            if event is not None:
                self._handle(event)

    def _handle(self, event: messages.Event) -> None:
        if self._verdict is None:
            self._execute(self._core.handle(event, time.monotonic()))

    # -- actions ---------------------------------------------------------------------------------------------------

    def _execute(self, actions: list[messages.Action]) -> None:
        for action in actions:
            match action:
                case messages.PollFleet(extra_slots):
                    self._watch.poll_now(extra_slots)
                case messages.Launch():
                    self._watch.extra_slots = 0
                    self._job.launch(action)
                case messages.Terminate(gently):
                    self._job.terminate(gently=gently)
                case messages.KillAttempt():
                    self._job.kill()
                case messages.RetainCheckpoint(key):
                    self._retain_checkpoint(key)
                case messages.Note(event, message, fields, is_warning):
                    self._note(event, message, fields, is_warning=is_warning)
                case messages.Finish(verdict):
                    self._verdict = verdict

    def _retain_checkpoint(self, key: CheckpointId) -> None:
        try:
            record_set_aside(self._rings[0], key)  # only the first share's flusher does retention
        except HoldfastError as error:
            _log.warning("retention is not told to keep %s, and may remove it: %s", key, error)

    def _note(self, event: str, message: str, fields: Mapping[str, Any], *, is_warning: bool) -> None:
        _log.log(logging.WARNING if is_warning else logging.INFO, "%s", message)
        self._status.emit(event, {"message": message, **fields})
        self._on_event({"event": event, "role": "supervisor", "message": message, **fields})

    def _wait_for_flushers(self, flushers: Sequence[KeptFlusher]) -> None:
        """Wait until everything staged is durable and the rings are removed."""
        for flusher in flushers:  # release all of them first: they wait for each other
            flusher.release()
        deadline = time.monotonic() + _DRAIN_SECONDS_MAX
        of_rings = list(zip(flushers, self._rings, strict=True))
        if not all(self._wait_for_flusher(flusher, ring, deadline) for flusher, ring in of_rings):
            return
        for flusher, ring in of_rings:
            if flusher.has_leftover_ring:
                message = (
                    f"not every staged checkpoint is in the store; the ring is kept in {ring}: start the run again, "
                    "or `holdfast flusher`, to publish them"
                )
                self._note("ring_left", message, {"directory": str(ring)}, is_warning=True)

    def _wait_for_flusher(self, flusher: KeptFlusher, ring: Path, deadline: float) -> bool:
        """Wait for the flusher to exit; False at the deadline or at a signal."""
        if not flusher.wait_for_exit(_POLL_SECONDS):
            message = "waiting until the flusher has made every staged checkpoint durable"
            self._note("draining", message, {}, is_warning=False)
        while not flusher.wait_for_exit(_POLL_SECONDS):
            if self._signals or time.monotonic() > deadline:
                message = (
                    f"the flusher is still writing, and continues without this command; its ring is {ring}"
                )
                self._note("flusher_left", message, {}, is_warning=True)
                return False
        return True

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # A second signal ends the wait. SIGHUP does not count: the shell repeats the one that the kernel sends to all.
        if number == signal.SIGHUP and self._is_stopping:
            return
        self._is_stopping = self._is_stopping or number != signal.SIGUSR1
        self._signals.append(number)


def next_attempt(logs: Path) -> int:
    """Return the number after the highest attempt in this directory, so that no earlier log is overwritten."""
    numbers = [int(path.name[8:]) for path in logs.glob("attempt-*") if path.name[8:].isdigit()]
    return max(numbers, default=0) + 1


def job_environment() -> dict[str, str]:
    """Return this process's environment without the variables of another MPI launcher, such as Slurm's PMI."""
    prefixes = ("OMPI_COMM_", "OMPI_UNIVERSE", "PMIX_", "PMI_", "PRTE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
