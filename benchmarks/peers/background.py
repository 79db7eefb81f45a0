"""One piece of work at a time in a thread, whose error reaches the training thread: what two-phase peers need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["Background"]


class Background:
    """Runs one thing at a time. One thread starts, waits and asks."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        self._future.set_result(None)

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`, after what is still running; raises what that raised."""
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
        """Return when nothing runs; raises what went wrong."""
        self._future.result()

    def done(self) -> bool:
        """Whether nothing runs; raises what went wrong."""
        if not self._future.done():
            return False
        self._future.result()
        return True
