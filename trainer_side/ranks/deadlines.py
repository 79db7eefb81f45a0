"""Deadlines for calls of a device or a store that may never return: each call runs in a thread of its own.

A thread that hangs in the kernel cannot be ended. It is abandoned, and its late result is dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Generic, TypeVar

_T = TypeVar("_T")
# Share of the deadline for a restore: a source without progress for this time counts as hanging.
HANGING_SHARE = 0.1


def within(
    call: Callable[[], _T], seconds_max: float, *, name: str, on_late: Callable[[_T], object] | None = None
) -> _T:
    """Call `call` in a thread, and wait at most `seconds_max`; raises its exception, or TimeoutError: it has not
    returned in time. `on_late` gets a result that comes after the deadline.
    """
    done: Future[_T] = Future()

    def run() -> None:
        try:
            answer = call()
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            with contextlib.suppress(InvalidStateError):  # the waiter has timed out
                done.set_exception(error)
            return
        try:
            done.set_result(answer)
        except InvalidStateError:
            if on_late is not None:
                on_late(answer)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return done.result(seconds_max)
    except TimeoutError:
        if done.cancel():  # else the call has returned just now, or has raised TimeoutError itself
            raise TimeoutError(f"the call did not return within {seconds_max:g} s") from None
        return done.result()


_R = TypeVar("_R")


class BoundedThreads(Generic[_T, _R]):
    """Runs `work` on each item, in order, in `threads` daemon threads.

    Not a thread pool: at exit the interpreter would wait for a hanging request.
    """

    def __init__(self, work: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str) -> None:
        self._work, self._name, self._started = work, name, 0
        self._pending: queue.SimpleQueue[tuple[_T, Future[_R]]] = queue.SimpleQueue()
        self.futures: list[Future[_R]] = []
        for item in items:
            self.futures.append(Future())
            self._pending.put((item, self.futures[-1]))
        self.add_threads(min(threads, len(self.futures)))

    def add_threads(self, threads: int) -> None:
        """Start this many more threads, to replace hanging ones."""
        for _ in range(threads):
            name = f"holdfast-{self._name}-{self._started}"
            self._started += 1
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                item, future = self._pending.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(self._work(item))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
                future.set_exception(error)


def run_in_threads(
    work: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str
) -> list[Future[_R]]:
    """The futures of a `BoundedThreads` that needs no further threads."""
    return BoundedThreads(work, items, threads, name).futures
