"""The calls of one tier that have not returned: a device that hangs has no error to return.

A call that does not return in time makes the tier hang: nothing more goes to it before that call has returned.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from holdfast.errors import StoreError
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.background_thread import ThreadDied
from trainer_side.ranks.deadlines import within

_log = logging.getLogger("holdfast.trainer.tiers")

_T = TypeVar("_T")


class _Call(NamedTuple):
    """A call that has not returned. `limit`: by when it should have."""

    what: str
    begun: float
    limit: float


class TierCalls:
    """See the module. Any thread.

    Args:
        seconds_max: How long a call may take, unless it says otherwise.

    Attributes:
        hangs: Why the tier takes nothing now: which call has not returned. None while it answers.
        died: What has ended a thread of the tier; it takes nothing more in this job then.
    """

    def __init__(self, name: str, rank: int, *, seconds_max: float) -> None:
        self._name, self._rank, self._seconds_max = name, rank, seconds_max
        self.hangs: Reason | None = None
        self.died: ThreadDied | None = None
        self._guard = threading.Lock()
        self._calls: dict[int, _Call] = {}  # by thread

    @contextlib.contextmanager
    def noted(self, what: str, seconds_max: float | None = None) -> Iterator[None]:
        """Within this context the thread calls the tier."""
        begun, me = time.monotonic(), threading.get_ident()
        limit = self._seconds_max if seconds_max is None else seconds_max
        with self._guard:
            self._calls[me] = _Call(what, begun, begun + limit)
        try:
            yield
        finally:
            with self._guard:
                del self._calls[me]

    def ask(
        self, what: str, call: Callable[[], _T], *, seconds_max: float, late: Callable[[_T], object]
    ) -> _T:
        """Make a call in another thread, and wait `seconds_max` for it.

        Args:
            what: The purpose of the call, for messages.
            call: The call.
            seconds_max: How long it may take.
            late: Called with the result if the call returns after the deadline.

        Raises:
            StoreError: It has not returned in time.
            HoldfastError: What the call raised.
        """

        def make() -> _T:
            with self.noted(what, seconds_max):
                return call()

        try:
            return within(make, seconds_max, name="holdfast-tier-ask", late=late)
        except TimeoutError:
            raise StoreError(
                f"tier {self._name} hangs: {what} has not returned for {seconds_max:g} s"
            ) from None

    def break_off(self, error: ThreadDied) -> None:
        """The tier takes nothing more in this job: a thread that serves it has died."""
        with self._guard:
            self.died = self.died or error
            self.hangs = DeclineCause.FAILED.because(self.died)

    def look(self) -> Reason | None:
        """See whether a call has been away for too long. Returns why the tier hangs, if that is news."""
        if self.died is not None:
            return None
        now = time.monotonic()
        with self._guard:
            late = next((call for call in self._calls.values() if now > call.limit), None)
            before, hangs = self.hangs, None
            if late is not None:
                hangs = before or DeclineCause.HANGS.because(
                    f"{late.what} has not returned for {now - late.begun:.3g} s, at most "
                    f"{late.limit - late.begun:g} s are waited"
                )
            self.hangs = hangs
        if before is None and hangs is not None:
            _log.error(
                "rank %d: tier %s takes nothing until its device answers: it %s",
                self._rank,
                self._name,
                hangs,
            )
            return hangs
        if before is not None and hangs is None:
            _log.warning("rank %d: tier %s answers again, and is used again", self._rank, self._name)
        return None
