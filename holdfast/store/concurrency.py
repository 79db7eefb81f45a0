"""Limits how many requests to a store are under way at once, each way, for all that this process does there.

disk, NFS: fixed            any fsspec store: fixed            S3: found by measurement (adaptive_limit.py), to 128
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TypeVar

from holdfast.store import is_s3, parts_at_once
from holdfast.store.adaptive_limit import AdaptiveLimit

_Result = TypeVar("_Result")

REQUESTS_MAX = 128
_REQUESTS_MIN = 2
_READS, _READS_S3 = 2, 8


class LimitedRequest:
    """A request under way. `nbytes`: what it carried; 0 if it failed or is of another kind."""

    def __init__(self) -> None:
        self.nbytes = 0


class ConcurrencyLimit:
    """Lets a number of requests through at once. May be used from any thread.

    Args:
        found: Finds how many are best; None: always `most`.
    """

    def __init__(
        self, most: int, found: AdaptiveLimit | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most, self._found, self._clock = most, found, clock
        self._free = threading.Condition()
        self._taken = 0

    @property
    def width(self) -> int:
        """How many requests may be under way now."""
        return self.most if self._found is None else self._found.width

    @contextmanager
    def request(self) -> Iterator[LimitedRequest]:
        """Wait until one more request may begin; it ends with the block."""
        with self._free:
            while self._taken >= self.width:
                self._free.wait()
            self._taken += 1
        request, began = LimitedRequest(), self._clock()
        try:
            yield request
        finally:
            now = self._clock()
            with self._free:
                before = self.width
                if self._found is not None and request.nbytes:
                    self._found.ended(began, now, request.nbytes, full=self._taken >= before)
                self._taken -= 1
                self._free.notify(1 + max(0, self.width - before))


class LimitedUntilFailure:
    """Requests of which none begins once one has failed. May be used from any thread.

    A store that is gone fails every request only after many tries; the waiting requests would add theirs.
    """

    def __init__(self) -> None:
        self._over: list[BaseException] = []

    def run(self, limit: ConcurrencyLimit, call: Callable[[LimitedRequest], _Result]) -> _Result:
        """Wait until the limit allows it, and make the call. Raises `CancelledError`: another one had failed before, or
        it is over.
        """
        with limit.request() as request:
            if self._over:
                raise CancelledError
            try:
                return call(request)
            except BaseException as error:
                self._over.append(error)  # before the next one may begin
                raise

    def check(self) -> None:
        """Raise what the first one that failed has raised, if one has."""
        if self._over:
            raise self._over[0]

    def end(self) -> None:
        """Nobody wants the answers of those that have not begun."""
        self._over.append(CancelledError())


def writing(url: str, most: int | None = None) -> ConcurrencyLimit:
    """The limit for the parts of uploads to the store at `url`.

    Args:
        url: The run.
        most: A number that somebody has set: it is kept to, and nothing is measured.
    """
    if most is not None or not is_s3(url):
        return ConcurrencyLimit(most or parts_at_once(url))
    return ConcurrencyLimit(
        REQUESTS_MAX, AdaptiveLimit(parts_at_once(url), least=_REQUESTS_MIN, most=REQUESTS_MAX)
    )


def reading(url: str, most: int | None = None) -> ConcurrencyLimit:
    """The same for long reads from it."""
    if most is not None or not is_s3(url):
        return ConcurrencyLimit(most or _READS)
    return _reading_s3(url)


@functools.lru_cache(16)
def _reading_s3(url: str) -> ConcurrencyLimit:  # noqa: ARG001 - what was found is kept: a tool and a flusher read one run many times
    return ConcurrencyLimit(REQUESTS_MAX, AdaptiveLimit(_READS_S3, least=_REQUESTS_MIN, most=REQUESTS_MAX))
