"""Worker threads for slow jobs, and the inbox for their messages to the event loop.

Plain threads are enough: CRC, pwrite and sockets all release the GIL. The loop waits on one file descriptor for all of
them, so an idle flusher costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from holdfast.process import wait_readable
from holdfast.store.concurrency import ConcurrencyLimit


class Inbox:
    """Messages of the threads to the loop. `put` may be called from any thread, all else only from the loop."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._eventfd

    def put(self, item: Any) -> None:
        self._items.put(item)
        os.eventfd_write(self._eventfd, 1)

    def drain(self) -> list[Any]:
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return []
        items: list[Any] = []
        while True:
            try:
                items.append(self._items.get_nowait())
            except queue.Empty:
                return items

    def wait(self, seconds: float | None) -> None:
        """Sleep until a message arrives, at most for `seconds`; None: no limit."""
        wait_readable([self._eventfd], seconds)

    def close(self) -> None:
        """Close the descriptor; nothing may be put after that."""
        os.close(self._eventfd)


class Workers:
    """Threads for one kind of job, the most urgent first; started on demand. `limit`: bounds how many run."""

    def __init__(self, name: str, threads: int, limit: ConcurrencyLimit | None = None) -> None:
        self._name, self._threads_max = name, threads
        self._limit = limit or ConcurrencyLimit(threads)
        self._ready = threading.Condition()
        self._jobs: list[tuple[tuple[int, ...], int, Callable[[], int | None]]] = []
        self._order = itertools.count()
        self._ended = False
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def submit(self, priority: tuple[int, ...], job: Callable[[], int | None]) -> None:
        """Queue `job`; lower `priority` runs first. It must not raise, and may return how many bytes it moved."""
        with self._ready:
            if self._ended:
                return
            heapq.heappush(self._jobs, (priority, next(self._order), job))
            if self._idle < len(self._jobs) and len(self._threads) < self._threads_max:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._ready.notify()

    def stop(self) -> None:
        """Drop queued jobs, and wait for running ones."""
        with self._ready:
            self._ended = True
            self._jobs.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._ready:
                self._idle += 1
                while not self._jobs and not self._ended:
                    self._ready.wait()
                self._idle -= 1
                if self._ended:
                    return
            with self._limit.request() as request:
                with self._ready:  # only now: a more urgent one may have arrived meanwhile
                    job = heapq.heappop(self._jobs)[2] if self._jobs else None
                if job is not None:
                    request.nbytes = job() or 0
            del job  # it may refer to much memory, and the next one may be long in coming
