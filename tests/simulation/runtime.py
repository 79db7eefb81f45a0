"""The simulation's operating system for the product: time, threads, poll, signals, ids.

The product's modules call `time.monotonic()`, `threading.Lock()`, `select.poll()`. `install` replaces those modules by
the fakes below, in every loaded module of the product, once per process; `SIM.now` is the running simulation. Files and
unix sockets stay the kernel's own: they never block here, and the scheduler polls them.
"""

from __future__ import annotations

import functools
import queue as real_queue
import select as real_select
import selectors as real_selectors
import signal as real_signal
import subprocess as real_subprocess
import sys
import threading as real_threading
import time as real_time
import types
import uuid as real_uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from tests.simulation.scheduler import Crashed, Scheduler, Task

__all__ = ["PLAYED_MIN", "SIM", "SimPoll", "install", "played_events", "readable"]

PRODUCT = ("holdfast", "flusher", "stager", "trainer_side")
PLAYED_MIN = 1_000_000  # descriptors from here on are simulated
_POLL_SECONDS = 0.2  # shorter pauses are polling: they end when there is news
_POLL_MAX_SECONDS = 1.0


class Current:
    """The simulation that runs in this process."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None
        self.popen: Callable[..., Any] | None = None
        self.reach: Callable[[str], None] = lambda point: None
        self.world: Any = None
        self.descriptors: dict[int, Any] = {}  # that the kernel does not know, each with its `mask()`

    @property
    def now(self) -> Scheduler:
        assert self.scheduler is not None, "no simulation runs"
        return self.scheduler


SIM = Current()


class PlayedModule(types.ModuleType):
    """A module of which some names are simulated; the others are the real module's."""

    def __init__(self, real: types.ModuleType) -> None:
        super().__init__(real.__name__)
        played = {name for made in type(self).__mro__ for name in vars(made)}
        vars(self).update({name: value for name, value in vars(real).items() if name not in played})


# -- time ------------------------------------------------------------------------------------------------------


class _Time(PlayedModule):
    EPOCH = 1_700_000_000.0

    def monotonic(self) -> float:
        return SIM.scheduler.now if SIM.scheduler else real_time.monotonic()

    perf_counter = monotonic

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def time(self) -> float:
        return self.EPOCH + self.monotonic()

    def sleep(self, seconds: float) -> None:
        _rest(None, seconds, "sleep")


def _rest(predicate: Callable[[], Any] | None, seconds: float | None, place: str) -> bool:
    """Wait. A short pause of a process that polls its port ends with the port's next news; without news it is long."""
    sim = SIM.now
    if sim.unwinding is not None or sim.current is None:
        raise Crashed
    port = sim.current.process.port
    if port is None or seconds is None or seconds >= _POLL_SECONDS:
        return sim.wait(predicate, seconds, place)
    news: Callable[[], Any] = port.has_news

    def either() -> Any:
        return news() or predicate()  # type: ignore[misc]

    if sim.wait(
        either if predicate is not None else news, sim.chance.uniform(_POLL_SECONDS, _POLL_MAX_SECONDS), place
    ):
        port.wakes += 1
    return bool(predicate()) if predicate is not None else False


# -- threads ---------------------------------------------------------------------------------------------------


class SimLock:
    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        sim = SIM.now
        if self._owner is not None:
            if sim.unwinding is not None:
                return True
            if not blocking:
                return False
            if not sim.wait(lambda: self._owner is None, None if timeout < 0 else timeout, "lock"):
                return False
        self._owner = sim.current
        return True

    def release(self) -> None:
        self._owner = None

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimRLock(SimLock):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not None and self._owner is SIM.now.current:
            self._depth += 1
            return True
        return super().acquire(blocking, timeout)

    def release(self) -> None:
        if self._depth:
            self._depth -= 1
        else:
            super().release()


class SimCondition:
    def __init__(self, lock: Any = None) -> None:
        self._lock = lock if lock is not None else SimLock()
        self._waiting: list[list[bool]] = []  # one for each waiting thread: empty until notified
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        cell: list[bool] = []
        self._waiting.append(cell)
        self._lock.release()
        try:
            SIM.now.wait(cell.__len__, timeout, "condition")
        finally:
            if SIM.now.unwinding is None:
                self._lock.acquire()
        if not cell:
            self._waiting = [other for other in self._waiting if other is not cell]
        return bool(cell)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        sim = SIM.now
        end = None if timeout is None else sim.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - sim.now
            if left is not None and left <= 0:
                return result
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for cell in self._waiting[:n]:
            cell.append(True)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimEvent:
    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            _rest(self.is_set, timeout, "event")
        return self._set


class SimFuture(Future[Any]):
    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = SimCondition()


class SimThread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self.name, self._args, self._kwargs = target, name, tuple(args), kwargs or {}
        self.daemon = daemon
        self._task: Task | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        sim = SIM.now
        sim.check_alive()
        self._task = sim.spawn(sim.here, self.name, self.run)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over

    def join(self, timeout: float | None = None) -> None:
        sim = SIM.now
        if sim.unwinding is None and self._task is not None:
            task = self._task
            sim.wait(lambda: task.over, timeout, f"join {self.name}")


class _Threading(PlayedModule):
    Lock, RLock, Condition, Event, Thread = SimLock, SimRLock, SimCondition, SimEvent, SimThread


class SimQueue(real_queue.Queue):  # type: ignore[type-arg]
    """`queue.SimpleQueue` and `queue.Queue`: never block the one real thread."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items: list[Any] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and block:
            SIM.now.wait(lambda: self._items, timeout, "queue")
        if not self._items:
            raise real_queue.Empty
        return self._items.pop(0)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class _Queue(PlayedModule):
    Queue = SimpleQueue = SimQueue
    Empty = real_queue.Empty
    Full = real_queue.Full


class InlineExecutor:
    """`ThreadPoolExecutor` that runs its work at once: concurrent readers do not affect each other."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
        return list(map(function, *items))

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future

    def shutdown(self, *_: Any, **__: Any) -> None: ...


# -- select ----------------------------------------------------------------------------------------------------


def _fd(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


def readable(files: Iterable[Any]) -> Callable[[], list[Any]]:
    """Return a function that lists those of these files that have something to read when it is called."""
    poll = real_select.poll()
    by_fd = {}
    for file in files:
        fd = _fd(file)
        if fd >= 0:
            by_fd[fd] = file
            poll.register(fd, real_select.POLLIN)
    # A file closed since has no descriptor any more, and its old number may belong to another file.
    return lambda: [by_fd[fd] for fd, _ in poll.poll(0) if _fd(by_fd[fd]) == fd]


class SimPoll:
    """`select.poll` of one simulated process. Its timeout is in milliseconds of the simulated clock."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._played: dict[int, int] = {}

    def register(self, file: Any, events: int) -> None:
        fd = _fd(file)
        assert events == real_select.POLLIN or fd >= PLAYED_MIN
        (self._played if fd >= PLAYED_MIN else self._files)[fd] = events

    modify = register

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        now = self._ready()
        if not (found := now()):
            _rest(now, None if milliseconds is None else milliseconds / 1000, "poll")
            found = now()
        else:
            SIM.now.step("poll")
        return found

    def _ready(self) -> Callable[[], list[tuple[int, int]]]:
        real = readable(self._files)
        return lambda: [(fd, real_select.POLLIN) for fd in real()] + played_events(self._played)


def played_events(wanted: dict[int, int]) -> list[tuple[int, int]]:
    """Which of these simulated descriptors are ready, and for which events."""
    found = []
    for fd, events in wanted.items():
        played = SIM.descriptors.get(fd)
        mask = played.mask() & (events | real_select.POLLERR) if played is not None else 0
        if mask:
            found.append((fd, mask))
    return found


def _not_played(*_: Any) -> Any:
    raise NotImplementedError(
        "the simulation plays select.poll and selectors: this call would wait for real seconds"
    )


class _Select(PlayedModule):
    poll = SimPoll
    select = epoll = _not_played


class SimSelector(real_selectors.PollSelector):
    """Asks the kernel without waiting; the scheduler does the waiting."""

    def select(self, timeout: float | None = None) -> list[tuple[real_selectors.SelectorKey, int]]:
        def now() -> list[tuple[real_selectors.SelectorKey, int]]:
            return real_selectors.PollSelector.select(self, 0)

        found = now()
        if found or (timeout is not None and timeout <= 0):
            SIM.now.step("selector")
            return found
        poll = self._selector.poll  # type: ignore[attr-defined] # skips the list of keys, which most turns leave empty
        _rest(functools.partial(poll, 0), timeout, "selector")
        return now()


class _Selectors(PlayedModule):
    DefaultSelector = PollSelector = SelectSelector = EpollSelector = SimSelector


# -- signals, processes, ids -----------------------------------------------------------------------------------


class _Signal(PlayedModule):
    def signal(self, number: int, handler: Any) -> Any:
        process = SIM.now.here
        before = process.handlers.get(number, real_signal.SIG_DFL)
        process.handlers[number] = handler
        return before

    def set_wakeup_fd(self, fd: int) -> int:
        SIM.now.here.notes["wakeup_fd"] = fd
        return -1


class _Subprocess(PlayedModule):
    @property
    def Popen(self) -> Any:  # noqa: N802 - as the module has it
        return SIM.popen or real_subprocess.Popen


class _Uuid(PlayedModule):
    def uuid4(self) -> real_uuid.UUID:
        return real_uuid.UUID(int=SIM.now.chance.getrandbits(128), version=4)


def _reach(point: Any) -> None:
    SIM.reach(str(point))


_FAKES: dict[str, Any] = {
    "time": _Time(real_time),
    "threading": _Threading(real_threading),
    "queue": _Queue(real_queue),
    "select": _Select(real_select),
    "selectors": _Selectors(real_selectors),
    "signal": _Signal(real_signal),
    "subprocess": _Subprocess(real_subprocess),
    "uuid": _Uuid(real_uuid),
}
_REAL = {
    "time": real_time,
    "threading": real_threading,
    "queue": real_queue,
    "select": real_select,
    "selectors": real_selectors,
    "signal": real_signal,
    "subprocess": real_subprocess,
    "uuid": real_uuid,
}


_installed: set[str] = set()


def install() -> None:
    """Put the fakes into every loaded module of the product, for the life of this process."""
    from concurrent.futures import ThreadPoolExecutor

    from holdfast import faultpoint

    real_reach = faultpoint.reach
    fake_time = _FAKES["time"]
    defaults = {
        real_time.monotonic: fake_time.monotonic,
        real_time.time: fake_time.time,
        real_time.sleep: fake_time.sleep,
        real_time.perf_counter: fake_time.perf_counter,
    }
    named = {
        real_threading.Lock: SimLock,
        real_threading.Event: SimEvent,
        real_threading.Condition: SimCondition,
        real_threading.Thread: SimThread,
        ThreadPoolExecutor: InlineExecutor,
        Future: SimFuture,
        real_reach: _reach,
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PRODUCT or name in _installed:
            continue
        _installed.add(name)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):
                if attribute in _REAL and value is _REAL[attribute]:
                    setattr(module, attribute, _FAKES[attribute])
            elif value is real_reach or (isinstance(value, type) and value in named):
                setattr(module, attribute, named[value])
            elif isinstance(value, type) and value.__module__ == name:
                _mend_factories(value)
                for member in list(vars(value).values()):  # a class may be completed by the first look at it
                    _mend_defaults(getattr(member, "__func__", member), defaults)
            elif isinstance(value, types.FunctionType):
                _mend_defaults(value, defaults)


def _mend_defaults(function: Any, defaults: dict[Any, Any]) -> None:
    """Replace defaults such as `def f(clock=time.monotonic)`, bound to the real function at import."""
    if not isinstance(function, types.FunctionType):
        return

    def mended(value: Any) -> Any:
        return defaults.get(value, value) if isinstance(value, types.BuiltinFunctionType) else value

    if function.__defaults__:
        function.__defaults__ = tuple(map(mended, function.__defaults__))
    if function.__kwdefaults__:
        function.__kwdefaults__ = {name: mended(value) for name, value in function.__kwdefaults__.items()}


def _mend_factories(made: type) -> None:
    """Replace factories such as `field(default_factory=threading.Event)`, bound when the class was made."""
    factories = {real_threading.Lock: SimLock, real_threading.Event: SimEvent}
    fields = [
        (field.name, factories[field.default_factory])
        for field in getattr(made, "__dataclass_fields__", {}).values()
        if field.default_factory in factories
    ]
    if not fields:
        return
    before = made.__init__  # type: ignore[misc]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        for name, factory in fields:
            object.__setattr__(self, name, factory())

    made.__init__ = init  # type: ignore[misc]
