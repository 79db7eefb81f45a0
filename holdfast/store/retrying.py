"""Retries for any store: the one place where failures of a store are waited out.

Backoff is exponential with full jitter, so that many writers do not return at the same moment. Only errors with
`StoreError.retriable` are retried, within a budget of attempts and of seconds. A server's `Retry-After` is respected
within the same bounds. Every call of the interface may be repeated safely, as the conformance suite checks.
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
    """How often, and for how long, one call may be retried."""

    attempts_max: int = 10
    seconds_max: float = 180.0  # no new attempt begins after this many seconds
    first_wait_seconds: float = 0.2  # upper end of the first random wait; it doubles with each attempt
    wait_seconds_max: float = 20.0  # upper end of any wait, also of one that the server asks for
    log_warnings: bool = True  # of failed attempts; the final error has the last one anyway


_CHECK_BUDGET = RetryBudget(attempts_max=6, seconds_max=8.0, wait_seconds_max=2.0, log_warnings=False)
"""Start-up must report a wrong address within seconds; later the same error may be a server that restarts. A check is
several requests and starts over when one fails: for a store that fails one in ten, three attempts were not enough."""


class Retrying(StoreWrapper):
    """Retries the calls of a store, and of its uploads."""

    def __init__(
        self, inner: Store, *, budget: RetryBudget | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self._budget, self._sleep = budget or RetryBudget(), sleep
        self._failures: Counter[str] = Counter()
        self._lock = threading.Lock()

    def with_inner(self, inner: Store) -> Retrying:
        """Return a wrapper of another store with the same budget and counts."""
        other = copy.copy(self)
        other._inner = inner
        return other

    def failures(self) -> dict[str, int]:
        """Return how often each call failed and was retried, so far. Any thread."""
        with self._lock:
            return dict(self._failures)

    def forward(self, method: str, call: Callable[[], Result], name: str = "") -> Result:  # noqa: ARG002
        """See `StoreWrapper`. Few attempts for `check`."""
        started = time.monotonic()
        try:
            return call()  # the usual case needs no bookkeeping
        except StoreError as error:
            if not error.retriable:
                raise
            first = error
        return self._retry(method, call, first, started, _CHECK_BUDGET if method == "check" else self._budget)

    def _retry(
        self, method: str, call: Callable[[], Result], first: StoreError, started: float, limits: RetryBudget
    ) -> Result:
        """Retry a call whose first attempt failed with `first`."""
        import tenacity  # imported late: most processes never need it, and it imports asyncio

        random_seconds = tenacity.wait_random_exponential(
            limits.first_wait_seconds, max=limits.wait_seconds_max
        )
        pending = [first]

        def attempt() -> Result:
            if pending:
                raise pending.pop()
            return call()

        def wait_seconds(state: tenacity.RetryCallState) -> float:
            """Add jitter to the server's `Retry-After`, so that not all return at once."""
            error = state.outcome.exception() if state.outcome else None
            requested_seconds = error.retry_after_seconds if isinstance(error, StoreError) else 0.0
            return min(limits.wait_seconds_max, requested_seconds + random_seconds(state))

        level = logging.WARNING if limits.log_warnings else logging.INFO
        left_seconds = limits.seconds_max - (time.monotonic() - started)
        retrying = tenacity.Retrying(
            sleep=self._sleep,
            stop=tenacity.stop_after_attempt(limits.attempts_max) | tenacity.stop_before_delay(left_seconds),
            wait=wait_seconds,
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, StoreError) and error.retriable
            ),
            before_sleep=lambda state: self._record_failure(method, state, level),
        )
        try:
            return retrying(attempt)
        except tenacity.RetryError as over:
            last = over.last_attempt.exception()
            tries = over.last_attempt.attempt_number
            start_over = isinstance(last, StoreError) and last.begin_anew
            raise StoreError(
                f"{last} (given up after {tries} attempts of {method})",
                retriable=not start_over,
                begin_anew=start_over,
            ) from last

    def _record_failure(self, method: str, state: tenacity.RetryCallState, level: int) -> None:
        with self._lock:
            self._failures[method] += 1
        error = state.outcome.exception() if state.outcome else None
        wait_seconds = state.next_action.sleep if state.next_action else 0.0
        message = "%s failed (attempt %d), retried in %.1f s: %s"
        _log.log(level, message, method, state.attempt_number, wait_seconds, error)
