"""Runs one piece of work at a time in a thread, and raises its error in the training thread, for two-phase peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["Background"]


class Background:
    """Runs one piece of work at a time; all methods are for one thread."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        self._future.set_result(None)

    def start(self, work: Callable[[], None]) -> None:
        """Wait for running work, raising its error, then start `work`."""
        self.wait()
        future = self._future = Future[None]()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, daemon=True).start()

    def wait(self) -> None:
        """Wait for running work; raise its error."""
        self._future.result()

    def done(self) -> bool:
        """Whether no work runs; raise the error of finished work."""
        if not self._future.done():
            return False
        self._future.result()
        return True
