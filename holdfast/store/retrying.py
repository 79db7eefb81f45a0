"""Any store, tried again: the one place where failures of a store are waited out.

Exponential backoff with full jitter, so that many writers do not come back at the same moment; only errors
that say that waiting may help (`StoreError.retriable`); within a budget of attempts and of seconds. A server
that says how long to stay away is believed, within the same bounds. Every call of the interface may be
repeated safely: that is part of what the conformance suite checks.
"""

from __future__ import annotations

import builtins
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import StoreError
from holdfast.store.base import SMALL_BYTES_MAX, BegunUpload, ObjectInfo, Store, Upload
from holdfast.store.names import Keep

if TYPE_CHECKING:
    import tenacity

_log = logging.getLogger("holdfast.store.retrying")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RetryBudget:
    """The time for which one call may be retried.

    Attributes:
        attempts_max: Attempts in all.
        seconds_max: No new attempt is begun after this many seconds.
        first_wait_seconds: Upper end of the first random wait; it doubles with each attempt.
        wait_seconds_max: Upper end of any wait, also of one that the server asks for.
        is_told: Whether the log has each attempt that failed; the error at the end names the last one anyway.
    """

    attempts_max: int = 10
    seconds_max: float = 180.0
    first_wait_seconds: float = 0.2
    wait_seconds_max: float = 20.0
    is_told: bool = True


_CHECK_BUDGET = RetryBudget(attempts_max=6, seconds_max=8.0, wait_seconds_max=2.0, is_told=False)
"""Start-up says within seconds that the address is wrong; later on the same error may be a server that restarts. Each
check is several requests and starts over when one fails: of a store that fails each tenth, three were not enough."""


class _Caller:
    """Calls a function until it succeeds, fails for good, or the budget is spent."""

    def __init__(self, budget: RetryBudget, sleep: Callable[[float], None]) -> None:
        self._budget, self._sleep = budget, sleep
        self._failures: Counter[str] = Counter()
        self._counting = threading.Lock()

    def failures(self) -> dict[str, int]:
        with self._counting:
            return dict(self._failures)

    def _failed(self, what: str, state: tenacity.RetryCallState, level: int) -> None:
        with self._counting:
            self._failures[what] += 1
        _log_failure(what, state, level)

    def __call__(self, what: str, call: Callable[[], _Result], budget: RetryBudget | None = None) -> _Result:
        begun = time.monotonic()
        try:
            return call()  # as a rule it succeeds, and there is nothing to keep count of
        except StoreError as error:
            if not error.retriable:
                raise
            first = error
        return self._again(what, call, first, begun, budget or self._budget)

    def _again(
        self,
        what: str,
        call: Callable[[], _Result],
        first: StoreError,
        begun: float,
        limits: RetryBudget,
    ) -> _Result:
        """What is left to do of a call, of which the first attempt has failed with `first`."""
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


def _after(first: StoreError, call: Callable[[], _Result]) -> Callable[[], _Result]:
    """`call`, of which the first attempt has been made and has failed with `first`."""
    made = [first]

    def attempt() -> _Result:
        if made:
            raise made.pop()
        return call()

    return attempt


class Retrying:
    """A store whose calls are tried again, those of its uploads as well.

    Args:
        inner: The store.
        budget: How long one call may be tried.
        sleep: Waits a number of seconds; tests hand in their own.
    """

    def __init__(
        self, inner: Store, *, budget: RetryBudget | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._inner = inner
        self._call = _Caller(budget or RetryBudget(), sleep)

    def around(self, inner: Store) -> Retrying:
        """Another store, tried again and counted as this one."""
        other = Retrying(inner)
        other._call = self._call
        return other

    def failures(self) -> dict[str, int]:
        """How often each call failed and was tried again, so far. Any thread."""
        return self._call.failures()

    @property
    def inner(self) -> Store:
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def request_bytes(self) -> int:
        return self._inner.request_bytes

    def close(self) -> None:
        close = getattr(self._inner, "close", None)
        if close is not None:
            close()

    def check(self, *, write: bool) -> None:
        """As the store's, with few attempts."""
        self._call("check", lambda: self._inner.check(write=write), _CHECK_BUDGET)

    def list(self) -> list[ObjectInfo]:
        return self._call("list", self._inner.list)

    def size(self, name: str) -> int:
        return self._call("size", lambda: self._inner.size(name))

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        return self._call("read", lambda: self._inner.read(name, bytes_max))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._call("read_into", lambda: self._inner.read_into(name, offset, buffer))

    def write(self, name: str, data: bytes) -> None:
        self._call("write", lambda: self._inner.write(name, data))

    def create(self, name: str, data: bytes) -> bool:
        return self._call("create", lambda: self._inner.create(name, data))

    def delete(self, name: str) -> None:
        self._call("delete", lambda: self._inner.delete(name))

    def retire(self, name: str) -> None:
        self._call("retire", lambda: self._inner.retire(name))

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> RetryingUpload:
        upload = self._call(
            "begin",
            lambda: self._inner.begin(name, nbytes=nbytes, chunk_bytes=chunk_bytes, write_id=write_id),
        )
        return RetryingUpload(upload, self._call)

    def resume(self, name: str, begun: BegunUpload) -> RetryingUpload:
        return RetryingUpload(self._call("resume", lambda: self._inner.resume(name, begun)), self._call)

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        return self._call("sweep", lambda: self._inner.sweep(keep))


class RetryingUpload:
    """An upload whose calls are tried again."""

    def __init__(self, inner: Upload, call: _Caller) -> None:
        self._inner, self._call = inner, call

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    @property
    def token(self) -> str | None:
        return self._inner.token

    @property
    def published(self) -> bool:
        return self._inner.published

    def written(self) -> frozenset[int]:
        return self._inner.written()

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        self._call("write_part", lambda: self._inner.write_part(index, buffers, crc32))

    def publish(self) -> None:
        self._call("publish", self._inner.publish)

    def abort(self) -> None:
        self._call("abort", self._inner.abort)


def _log_failure(what: str, state: tenacity.RetryCallState, level: int) -> None:
    error = state.outcome.exception() if state.outcome else None
    wait_seconds = state.next_action.sleep if state.next_action else 0.0
    _log.log(
        level,
        "%s failed (attempt %d), retried in %.1f s: %s",
        what,
        state.attempt_number,
        wait_seconds,
        error,
    )
