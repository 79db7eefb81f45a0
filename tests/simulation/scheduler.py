"""One seeded scheduler for everything that runs: processes, their threads, the network and the clock.

    Process "flusher"          Process "rank 0"             timers (deliveries, faults)
      ├ task  main loop          ├ task  training script       │
      ├ task  writer-0           └ task  link                  │
      └ task  heartbeat               │                        │
              └──────── wait, sleep, lock, store call ─────────┴──► the seed picks one; one runs at a time

A task is a greenlet that runs the product's own code until it waits for something or passes a point at which another
process could act; that is one *event*. Between two events the invariants are checked and faults strike. Killing a
process ends its tasks where they are: their effects while unwinding reach no other process.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

__all__ = ["Crashed", "Process", "Scheduler", "Stuck", "Task"]

_STEP_SECONDS = 0.0004


class Crashed(BaseException):
    """The process was killed: raised in its tasks where they are."""


class Stuck(AssertionError):
    """A task waits forever, or spins."""


class Process:
    """A simulated operating system process.

    Attributes:
        name: Such as `flusher-2` or `rank 1 of job 0`; `kind` is `flusher`, `stager`, `rank` or `world`.
        alive: Neither ended nor killed.
        held: Called at its death, to close the things that the kernel would close.
        error: The exception of its main function.
    """

    def __init__(self, scheduler: Scheduler, kind: str, name: str, number: int) -> None:
        self.scheduler, self.kind, self.name, self.number = scheduler, kind, name, number
        self.alive = True
        self.killed = False
        self.tasks: list[Task] = []
        self.held: list[Callable[[], None]] = []
        self.handlers: dict[int, Callable[..., Any]] = {}
        self.port: Any = None
        self.stopped_until = -1.0
        self.error: BaseException | None = None
        self.points: dict[str, int] = {}
        self.kill_at: dict[tuple[str, int], str] = {}
        self.doomed = False
        self.notes: dict[str, Any] = {}
        self.on_end: list[Callable[[Process], None]] = []

    def is_over(self) -> bool:
        """Whether the process has ended or was killed."""
        return not self.alive


class Task:
    """One thread of a process."""

    __slots__ = ("deadline", "function", "green", "name", "over", "place", "predicate", "process", "woken")

    def __init__(self, process: Process, name: str, function: Callable[[], None], hub: greenlet) -> None:
        self.process, self.name, self.function = process, name, function
        self.green = greenlet(self._run, parent=hub)
        self.predicate: Callable[[], Any] | None = None
        self.deadline: float | None = 0.0  # None: only the predicate wakes it
        self.woken = False
        self.over = False
        self.place = "start"

    def _run(self) -> None:
        try:
            self.function()
        except Crashed:
            pass
        except BaseException as error:  # noqa: BLE001 - the world checks on threads that died
            if not self.process.killed or self.process.error is error:
                self.process.error = self.process.error or error
                self.process.notes.setdefault("raised", []).append((self.name, error))
        finally:
            self.over = True


class Scheduler:
    """Runs tasks one event at a time, in an order that the seed decides.

    Attributes:
        chance: The one source of randomness. `now`: seconds on the clock. `events`: their number so far.
        after_event: Called between two events. `ran`: the process whose task ran in the last one.
    """

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.events = 0
        self.tasks: list[Task] = []
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pids = itertools.count(1000)
        self.current: Task | None = None
        self.ran: Process | None = None
        self.unwinding: Process | None = None
        self.after_event: Callable[[], None] = lambda: None
        self.hub = getcurrent()
        self.tracing = trace
        self.trace: list[str] = []

    # -- making and ending ---------------------------------------------------------------------------------------

    def process(self, kind: str, name: str, main: Callable[[], None]) -> Process:
        """Start a process whose main thread runs `main`."""
        made = Process(self, kind, name, next(self._pids))

        def run() -> None:
            try:
                main()
            except Exception as error:
                made.error = error
                raise
            finally:
                if not made.killed:
                    self._exit(made)

        self.spawn(made, "main", run)
        self.note(f"+ {name} starts")
        return made

    def spawn(self, process: Process, name: str, function: Callable[[], None]) -> Task:
        """Start one more thread in a process."""
        task = Task(process, name, function, self.hub)
        process.tasks.append(task)
        self.tasks.append(task)
        return task

    def kill(self, process: Process, why: str) -> None:
        """SIGKILL: from the hub only."""
        if not process.alive:
            return
        assert getcurrent() is self.hub
        self.note(f"! {process.name} is killed: {why}")
        process.killed = True
        self._end(process)

    def _exit(self, process: Process) -> None:
        """The main function has ended: the other threads end from the next event on."""
        raised = process.error or process.notes.get("ended_with")
        error = f" with {type(raised).__name__}: {raised}" if raised else ""
        self.note(f"- {process.name} ends{error}")
        process.killed = True  # from here on its other threads must not affect other processes
        self.call_at(self.now, lambda: self._end(process))

    def _end(self, process: Process) -> None:
        if not process.alive:
            return
        process.alive = False
        self.unwinding = process
        for close in reversed(process.held):
            close()
        for task in process.tasks:
            if not task.over and task.green:
                task.green.throw(Crashed)
            task.over = True
        self.tasks = [task for task in self.tasks if task.process is not process]
        process.held.clear()
        self.unwinding = None
        for heard in process.on_end:
            heard(process)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Make the hub call `call` at a time."""
        heapq.heappush(self.timers, (when, next(self._order), call))

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Make the hub call `call` after some seconds."""
        self.call_at(self.now + seconds, call)

    # -- what tasks call -----------------------------------------------------------------------------------------

    @property
    def here(self) -> Process:
        """The process whose code is running."""
        if self.unwinding is not None:
            return self.unwinding
        assert self.current is not None, "no task runs"
        return self.current.process

    def check_alive(self) -> None:
        """Raise `Crashed` in a process that is dead and only unwinds."""
        if self.unwinding is not None or (self.current is not None and self.current.process.killed):
            raise Crashed

    def wait(self, predicate: Callable[[], Any] | None, seconds: float | None, place: str = "") -> bool:
        """Let others run until `predicate` holds (True) or this many seconds have passed (False)."""
        task = self.current
        if task is None or self.unwinding is not None:
            raise Crashed
        if task.process.killed:
            raise Crashed
        task.predicate = predicate
        task.deadline = None if seconds is None else self.now + max(0.0, seconds)
        task.place = place
        task.woken = False
        self.hub.switch()
        return task.woken

    def step(self, place: str) -> None:
        """A point at which any other task may run."""
        self.wait(None, 0.0, place)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(  # noqa: C901 - one loop, read in one piece
        self, *, until: Callable[[], bool], events_max: int, seconds_max: float
    ) -> None:
        """Run until `until` holds.

        Raises:
            Stuck: No task can run any more, or the run exceeds `events_max` or `seconds_max`.
        """
        end = self.now + seconds_max
        chance, timers, after_event = self.chance, self.timers, self.after_event
        while not until():
            if self.events > events_max:
                raise Stuck(f"not over after {self.events} events: {self.who_waits()}")
            while timers and timers[0][0] <= self.now:
                heapq.heappop(timers)[2]()
            ready: list[Task] = []
            now, soonest = self.now, timers[0][0] if timers else math.inf
            for task in self.tasks:
                if task.over:
                    continue
                held_until = task.process.stopped_until
                if held_until > now:
                    soonest = min(soonest, held_until)
                    continue
                deadline, predicate = task.deadline, task.predicate
                if deadline is not None and deadline <= now:
                    ready.append(task)
                elif predicate is not None and predicate():
                    task.woken = True
                    ready.append(task)
                elif deadline is not None and deadline < soonest:
                    soonest = deadline
            if not ready:
                if soonest == math.inf:
                    raise Stuck(f"nobody can go on: {self.who_waits()}")
                if soonest > end:
                    raise Stuck(f"not over after {seconds_max:g} s: {self.who_waits()}")
                self.now = soonest
                continue
            task = ready[int(chance.random() * len(ready))] if len(ready) > 1 else ready[0]
            self.now += _STEP_SECONDS
            self.events += 1
            if task.predicate is not None and not task.woken and task.predicate():
                task.woken = True
            if self.tracing:
                self.note(f"  {task.process.name}/{task.name} from {task.place}")
            task.predicate = None
            self.current = task
            task.green.switch()
            self.current, self.ran = None, task.process
            if task.over:
                self.tasks = [other for other in self.tasks if not other.over]
            if task.process.doomed and task.process.alive:
                self.kill(task.process, f"at {task.place}")
            after_event()

    def close(self) -> None:
        """End all tasks and release everything."""
        for process in dict.fromkeys(task.process for task in self.tasks):
            process.killed = True
            self._end(process)

    def note(self, text: str) -> None:
        """Add a line to the trace, if tracing; a failing seed is replayed with a trace."""
        if not self.tracing:
            return
        self.trace.append(f"{self.events:6d} {self.now:12.4f} {text}")

    def who_waits(self) -> str:
        """Describe all tasks and where they wait, for error messages."""
        return "; ".join(f"{task.process.name}/{task.name} at {task.place or '?'}" for task in self.tasks)
