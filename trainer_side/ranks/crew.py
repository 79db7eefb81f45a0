"""A few threads that work through a list, for as long as that takes and no longer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["Crew", "start"]

_T = TypeVar("_T")
_R = TypeVar("_R")


class Crew(Generic[_T, _R]):
    """Runs `work` on each item, in order, in `threads` threads.

    Daemon threads, not a pool: the interpreter would wait at its end for a request that hangs.

    Attributes:
        futures: One for each item.
    """

    def __init__(self, work: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str) -> None:
        self._work, self._name, self._started = work, name, 0
        self._pending: queue.SimpleQueue[tuple[_T, Future[_R]]] = queue.SimpleQueue()
        self.futures: list[Future[_R]] = []
        for item in items:
            self.futures.append(Future())
            self._pending.put((item, self.futures[-1]))
        self.relieve(min(threads, len(self.futures)))

    def relieve(self, threads: int) -> None:
        """Start so many more, for those that do not come back."""
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


def start(work: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str) -> list[Future[_R]]:
    """The futures of a `Crew` that needs no relief."""
    return Crew(work, items, threads, name).futures
