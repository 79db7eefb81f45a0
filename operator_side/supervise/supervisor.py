"""The loop around the core: carries its actions out, tells it what happened. One thread, and one to ask the fleet.

    signals, mpirun's output, event log, fleet, clock ─► Core ─► start, ask, terminate, kill mpirun; notes; the end

What is left behind: `status.jsonl` (one line for each thing decided), `events.jsonl` (stager and flusher), and a folder
for each attempt with a file for each process, all on this machine, which is not taken away.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.ring.directory import runtime_directory
from holdfast.supervised import ATTEMPT_VARIABLE
from holdfast.telemetry.events import EventLog
from operator_side.supervise.attempt import Attempt
from operator_side.supervise.core import Core
from operator_side.supervise.flusher import KeptFlusher, Segments
from operator_side.supervise.hosts import Fleet, Host
from operator_side.supervise.job_output import Follower, Output, meaning
from operator_side.supervise.supervisor_messages import (
    Action,
    ClockTick,
    Event,
    Exited,
    Finish,
    HostsSeen,
    KillAttempt,
    Launch,
    LookAtFleet,
    Note,
    Stop,
    Terminate,
)
from operator_side.supervise.verdict import Verdict

_log = logging.getLogger("holdfast.run")

_TURN_SECONDS = 0.1


class _Watch(threading.Thread):
    """Asks the fleet: every so often, and at once when told to."""

    def __init__(self, fleet: Fleet, poll_seconds: float) -> None:
        super().__init__(name="fleet", daemon=True)
        self._fleet, self._poll_seconds = fleet, poll_seconds
        self._wake, self._over = threading.Event(), False
        self.replace = 0
        self.seen: queue.SimpleQueue[tuple[Host, ...] | None] = queue.SimpleQueue()

    def ask(self, replace: int) -> None:
        """Look now; ask for so many slots more, now and at each later look."""
        self.replace = replace
        self._wake.set()

    def stop(self) -> None:
        """End when the look under way is over. It is not waited for: a network may take long to give up."""
        self._over = True
        self._wake.set()

    def run(self) -> None:
        """Until `stop`."""
        while True:
            self._wake.wait(self._poll_seconds)
            self._wake.clear()
            if self._over:
                return
            try:
                if self.replace:
                    self._fleet.replace(self.replace)
                self.seen.put(self._fleet.look())
            except HoldfastError as error:
                _log.warning("%s: %s; what was known of it before is still believed", self._fleet.name, error)
            except Exception:  # noqa: BLE001 - whatever it is, the job must go on
                _log.exception("%s could not be asked", self._fleet.name)


class Supervisor:
    """Runs a job until it is done, stopped, or not worth another attempt. Main thread: it handles signals.

    Args:
        core: What decides.
        fleet: Where hosts come from.
        command: The mpirun line of an attempt.
        environment: For mpirun.
        store: URL of the run, and `runtime_dir` of its ring, which is kept for the next attempt while this lives.
        logs: Directory for all that is written down.
        events: The event log that stager and flusher write.
        relay: Called with (stream, text) for each line of the job.
        poll_seconds: How often the fleet is asked.
        drain_seconds_max: How long to wait for the flusher in the end.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        core: Core,
        fleet: Fleet,
        command: Callable[[Launch], Sequence[str]],
        environment: Mapping[str, str],
        *,
        store: str,
        runtime_dir: Path,
        logs: Path,
        events: Path,
        relay: Callable[[str, str], None],
        poll_seconds: float = 15.0,
        drain_seconds_max: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._fleet, self._command, self._environment = core, fleet, command, environment
        self._ring = runtime_directory(store, runtime_dir)
        self._logs, self._relay, self._clock = logs, relay, clock
        self._follower = Follower(events)
        self._drain_seconds_max = drain_seconds_max
        self._status = EventLog(logs / "status.jsonl", role="supervisor")
        self._watch = _Watch(fleet, poll_seconds)
        self._attempt: Attempt | None = None
        self._output: Output | None = None
        self._last_output: Output | None = None
        self._segments = Segments(self._ring)
        self._signals: list[int] = []
        self._verdict: Verdict | None = None

    def run(self) -> Verdict:
        """Supervise. The verdict on the last attempt; whatever it says, no process of the job is left.

        Raises:
            ConfigError: The runtime directory is not safely ours.
        """
        flusher = KeptFlusher(self._ring)
        before = {
            number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)
        }
        self._watch.start()
        try:
            self._do(self._core.begin())
            while self._verdict is None:
                self._turn()
            self._wait_for(flusher)
        finally:
            flusher.let_go()
            if self._attempt is not None:
                self._attempt.kill()
                self._attempt.sweep()
                self._attempt.close()
            self._segments.remove()
            self._watch.stop()
            self._status.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._verdict

    def last_words(self, verdict: Verdict) -> list[str]:
        """The end of the log that says most about this verdict, and where the whole of it is."""
        output = self._last_output
        if output is None:
            return []
        return [*output.tail(verdict.rank), f"[all of it: {output.path(verdict.rank)}]"]

    # -- one turn --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._rest()
        while self._signals:
            number = self._signals.pop(0)
            self._take(Stop(f"{signal.Signals(number).name} came"))
        self._hear_job()
        for said in self._follower.read():
            event = meaning(said)
            if event is not None:
                self._take(event)
        while not self._watch.seen.empty():
            self._take(HostsSeen(self._watch.seen.get()))
        self._take(ClockTick())

    def _rest(self) -> None:
        if self._attempt is None:
            time.sleep(_TURN_SECONDS)
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._attempt.output, selectors.EVENT_READ)
            if selector.select(_TURN_SECONDS) and self._attempt.poll() is not None:
                time.sleep(0)  # readable for good: it has ended

    def _hear_job(self) -> None:
        attempt, output = self._attempt, self._output
        if attempt is None or output is None:
            return
        status = attempt.poll()  # before the last read: what it said comes first
        while data := attempt.read():
            for report in output.feed(data):
                self._take(report)
        if status is None:
            return
        left = attempt.sweep()
        if left:
            _log.error("processes %s of the job do not die; look at them with ps", left)
        while data := attempt.read():
            for report in output.feed(data):
                self._take(report)
        for report in output.feed(b""):
            self._take(report)
        attempt.close()
        output.close()
        self._segments.remove()
        self._attempt, self._output = None, None
        # The log first: what became durable before the end counts as progress of this attempt.
        for said in self._follower.read():
            event = meaning(said)
            if event is not None:
                self._take(event)
        self._take(Exited(status))

    def _take(self, event: Event) -> None:
        if self._verdict is None:
            self._do(self._core.handle(event, self._clock()))

    # -- actions ---------------------------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case LookAtFleet(replace):
                    self._watch.ask(replace)
                case Launch():
                    self._launch(action)
                case Terminate(gently) if self._attempt is not None:
                    self._attempt.ask() if gently else self._attempt.terminate()
                case KillAttempt() if self._attempt is not None:
                    self._attempt.kill()
                case Note(event, message, fields, loud):
                    self._note(event, message, fields, loud=loud)
                case Finish(verdict):
                    self._verdict = verdict
                    self._note(
                        "over",
                        verdict.message,
                        {"cause": verdict.cause.value, "exit_code": verdict.exit_code},
                        loud=verdict.exit_code != 0,
                    )

    def _launch(self, action: Launch) -> None:
        self._watch.replace = 0
        self._output = self._last_output = Output(
            self._logs / f"attempt-{action.attempt:03d}", action.ranks, self._relay
        )
        environment = {**self._environment, ATTEMPT_VARIABLE: str(action.attempt)}
        if action.hosts is None:
            environment = self._segments.make(environment)
        self._attempt = Attempt(self._command(action), environment)

    def _note(self, event: str, message: str, fields: Mapping[str, Any], *, loud: bool) -> None:
        _log.log(logging.WARNING if loud else logging.INFO, "%s", message)
        self._status.emit(event, {"message": message, **fields})

    def _wait_for(self, flusher: KeptFlusher) -> None:
        """What is staged becomes durable, and the ring is given back, before this process says that all is over."""
        flusher.let_go()
        deadline = self._clock() + self._drain_seconds_max
        if not flusher.ends_within(_TURN_SECONDS):
            message = "waiting until the flusher has made all durable that was staged"
            self._note("draining", message, {}, loud=False)
        while not flusher.ends_within(_TURN_SECONDS):
            if self._signals or self._clock() > deadline:
                message = f"the flusher still works; it goes on by itself: {self._ring}"
                self._note("flusher_left", message, {}, loud=True)
                return
        if flusher.left_ring:
            message = (
                f"a ring is left in {self._ring}: start the run again, or `holdfast flusher`, to publish it"
            )
            self._note("ring_left", message, {"directory": str(self._ring)}, loud=True)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)


def next_attempt(logs: Path) -> int:
    """The number after the highest attempt in this directory: a supervisor that is started again overwrites nothing."""
    numbers = [int(path.name[8:]) for path in logs.glob("attempt-*") if path.name[8:].isdigit()]
    return max(numbers, default=0) + 1


def environment_of_job(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, without what the launcher of another MPI job has left in it: inside Slurm that is only PMI's own."""
    prefixes = ("OMPI_COMM_", "OMPI_UNIVERSE", "PMIX_", "PMI_", "PRTE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)} | dict(more or {})
