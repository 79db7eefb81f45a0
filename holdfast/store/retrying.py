"""Any store, tried again: the one place where failures of a store are waited out.

Exponential backoff with full jitter, so that many writers do not come back at the same moment; only errors
that say that waiting may help (`StoreError.retriable`); within a budget of attempts and of seconds. A server
that says how long to stay away is believed, within the same bounds. Every call of the interface may be
repeated safely: that is part of what the conformance suite checks.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import StoreError
from holdfast.store.base import Store
from holdfast.store.wrapper import Result, StoreWrapper

if TYPE_CHECKING:
    import tenacity

_log = logging.getLogger("holdfast.store.retrying")


@dataclass(frozen=True)
class RetryBudget:
    """The time for which one call may be retried."""

    attempts_max: int = 10
    seconds_max: float = 180.0  # no new attempt is begun after this many seconds
    first_wait_seconds: float = 0.2  # upper end of the first random wait; it doubles with each attempt
    wait_seconds_max: float = 20.0  # upper end of any wait, also of one that the server asks for
    is_told: bool = (
        True  # whether the log has each attempt that failed; the error at the end names the last one anyway
    )


_CHECK_BUDGET = RetryBudget(attempts_max=6, seconds_max=8.0, wait_seconds_max=2.0, is_told=False)
"""Start-up says within seconds that the address is wrong; later on the same error may be a server that restarts. Each
check is several requests and starts over when one fails: of a store that fails each tenth, three were not enough."""


class Retrying(StoreWrapper):
    """A store whose calls are tried again, and those of its uploads."""

    def __init__(
        self, inner: Store, *, budget: RetryBudget | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self._budget, self._sleep = budget or RetryBudget(), sleep
        self._failures: Counter[str] = Counter()
        self._counting = threading.Lock()

    def around(self, inner: Store) -> Retrying:
        """Another store, tried again and counted as this one."""
        other = copy.copy(self)
        other._inner = inner
        return other

    def failures(self) -> dict[str, int]:
        """How often each call failed and was tried again, so far. Any thread."""
        with self._counting:
            return dict(self._failures)

    def forward(self, what: str, call: Callable[[], Result], name: str = "") -> Result:  # noqa: ARG002
        """See `StoreWrapper`. Few attempts for `check`."""
        begun = time.monotonic()
        try:
            return call()  # as a rule it succeeds, and there is nothing to keep count of
        except StoreError as error:
            if not error.retriable:
                raise
            first = error
        return self._again(what, call, first, begun, _CHECK_BUDGET if what == "check" else self._budget)

    def _again(
        self,
        what: str,
        call: Callable[[], Result],
        first: StoreError,
        begun: float,
        limits: RetryBudget,
    ) -> Result:
        """Repeat a call whose first attempt failed with `first`."""
        import tenacity  # here: most processes never need it, and it brings asyncio with it

        random_seconds = tenacity.wait_random_exponential(
            limits.first_wait_seconds, max=limits.wait_seconds_max
        )

        def wait_seconds(state: tenacity.RetryCallState) -> float:
            """On top of what the server asked for, so that not all come back at once."""
            error = state.outcome.exception() if state.outcome else None
            asked_seconds = error.retry_after_seconds if isinstance(error, StoreError) else 0.0
            return min(limits.wait_seconds_max, asked_seconds + random_seconds(state))

        retrying = tenacity.Retrying(
            sleep=self._sleep,
            stop=tenacity.stop_after_attempt(limits.attempts_max)
            | tenacity.stop_before_delay(limits.seconds_max - (time.monotonic() - begun)),
            wait=wait_seconds,
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, StoreError) and error.retriable
            ),
            before_sleep=lambda state: self._failed(
                what, state, logging.WARNING if limits.is_told else logging.INFO
            ),
        )
        try:
            return retrying(_after(first, call))
        except tenacity.RetryError as over:
            last = over.last_attempt.exception()
            tries = over.last_attempt.attempt_number
            anew = isinstance(last, StoreError) and last.begin_anew
            raise StoreError(
                f"{last} (given up after {tries} attempts of {what})", retriable=not anew, begin_anew=anew
            ) from last

    def _failed(self, what: str, state: tenacity.RetryCallState, level: int) -> None:
        with self._counting:
            self._failures[what] += 1
        error = state.outcome.exception() if state.outcome else None
        wait_seconds = state.next_action.sleep if state.next_action else 0.0
        message = "%s failed (attempt %d), retried in %.1f s: %s"
        _log.log(level, message, what, state.attempt_number, wait_seconds, error)


def _after(first: StoreError, call: Callable[[], Result]) -> Callable[[], Result]:
    """`call`, of which the first attempt has been made and has failed with `first`."""
    made = [first]

    def attempt() -> Result:
        if made:
            raise made.pop()
        return call()

    return attempt
