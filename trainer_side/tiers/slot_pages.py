"""The pages of a slot file on a tmpfs: those of the next slot are made at once, the others beside training.

    a file with its size ─► next slot: several threads, before training ─► first save
                        └─► each other slot: few threads ─► made: may be begun
                                                        └─► failed: logged; retried when a save asks for a slot

The size of a file is a promise: every rank subtracts the pages that the others have not made yet from the free room, so
a tier that is too small is found before training. After a kill, the next process makes the missing pages. Nobody may
touch a slot whose pages are missing: a store into it could be a SIGBUS.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from holdfast.errors import StoreError

_log = logging.getLogger("holdfast.trainer")


class SlotPages:
    """Makes the pages of slots in a thread of its own. Any thread.

    `make` makes those of one slot, stops early if the function that it gets returns True, and raises an error if room
    is lacking. `missing` are the slots without pages.
    """

    def __init__(
        self, make: Callable[[int, Callable[[], bool]], object], missing: Iterable[int], *, what: str
    ) -> None:
        self._make, self._what = make, what
        self._changed = threading.Condition()
        self._missing = sorted(missing)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._running = False
        self._problem: StoreError | None = None  # the first one; stays until all pages are there

    @property
    def is_making_slots(self) -> bool:
        with self._changed:
            return self._running

    def start(self, made: Callable[[int], object], ended: Callable[[], object]) -> bool:
        """Start the thread, which calls `made` per finished slot, then `ended`. False: no work, running, or stopped."""
        with self._changed:
            if self._running or self._stopped.is_set() or not self._missing:
                return False
            self._running = True
            self._thread = threading.Thread(
                target=self._run, args=(made, ended), name="holdfast-slots", daemon=True
            )
            self._thread.start()
            return True

    @property
    def problem(self) -> StoreError | None:
        """Why slots are missing although the thread has ended; None while it runs."""
        with self._changed:
            return None if self._running else self._problem

    def wait(self, slot: int) -> bool:
        """Wait for the pages of a slot; False: they will not be made."""
        with self._changed:
            self._changed.wait_for(lambda: slot not in self._missing or not self._running)
            return slot not in self._missing

    def stop(self) -> None:
        """Make no more pages; the thread ends within milliseconds."""
        self._stopped.set()

    def join(self, seconds_max: float) -> None:
        """Wait at most `seconds_max` for the end of the thread."""
        if self._thread is not None:
            self._thread.join(seconds_max)

    def _run(self, made: Callable[[int], object], ended: Callable[[], object]) -> None:
        try:
            while (slot := self._next()) is not None:
                self._make(slot, self._stopped.is_set)
                if self._stopped.is_set():
                    break
                with self._changed:
                    self._missing.remove(slot)
                made(slot)
                with self._changed:
                    self._changed.notify_all()
            with self._changed:
                self._problem = self._problem if self._missing else None
        except Exception as error:  # noqa: BLE001 - saves continue in the existing slots
            problem = StoreError(f"{self._what}: {error}; the next save that finds no slot tries again")
            with self._changed:
                news, self._problem = self._problem is None, self._problem or problem
            if news:
                _log.error("%s", problem)
        finally:
            ended()
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            return None if self._stopped.is_set() else next(iter(self._missing), None)
