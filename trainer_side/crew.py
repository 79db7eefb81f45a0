"""A few threads that work through a list, for as long as that takes and no longer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["start"]

_T = TypeVar("_T")
_R = TypeVar("_R")


def start(work: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str) -> list[Future[_R]]:
    """Run `work` on each item, in order, in `threads` threads.

    Daemon threads, not a pool: the interpreter would wait at its end for a request that hangs.
    """
    pending: queue.SimpleQueue[tuple[_T, Future[_R]]] = queue.SimpleQueue()
    futures: list[Future[_R]] = []
    for item in items:
        futures.append(Future())
        pending.put((item, futures[-1]))

    def serve() -> None:
        while True:
            try:
                item, future = pending.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
                future.set_exception(error)

    for number in range(min(threads, len(futures))):
        threading.Thread(target=serve, name=f"holdfast-{name}-{number}", daemon=True).start()
    return futures
