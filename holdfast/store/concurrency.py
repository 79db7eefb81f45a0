"""Limits the requests in flight to a store, in each direction, over all that this process does there.

    disk, NFS: fixed          any fsspec store: fixed          S3: found by measurement, up to 128

    growing ── faster by enough ──► wider still          narrowing ── as fast with fewer ──► narrower still
       └────── not: back ──► narrowing                       └── not: back ──► keeping ── after a while ──► growing …

Throughput is estimated from single requests: each carries its bytes over its own time, and `width` of them run in
parallel. The end of an upload and the pauses between uploads therefore do not distort the estimate. While each
connection keeps its speed as their number grows, the next step is a factor of four, else of two. A width that did not
help is tried again after ever longer pauses, since the network may change.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from enum import Enum, auto
from typing import TypeVar

from holdfast.store import is_s3, parts_at_once

_FASTER = 1.08  # least speedup for which twice as many are kept
_AS_FAST = 0.96  # fraction of the speed that a quarter fewer must keep
_UNDISTURBED = 0.85  # fraction of its speed that a connection must keep beside more of them
_SAMPLES_MIN, _SAMPLES_MAX = 4, 32
_KEPT_WINDOWS, _KEPT_WINDOWS_MAX = 8, 32


class _Phase(Enum):
    FIRST = auto()
    GROWING = auto()
    NARROWING = auto()
    KEEPING = auto()


class AdaptiveLimit:
    """Finds the best number of requests, `minimum` to `maximum`, from the speed of finished ones. Not thread-safe."""

    def __init__(self, start: int, *, minimum: int, maximum: int) -> None:
        if not 1 <= minimum <= start <= maximum:
            raise ValueError(f"expected 1 <= minimum <= start <= maximum, got {minimum}, {start}, {maximum}")
        self._minimum, self._maximum = minimum, maximum
        self._width, self._phase = start, _Phase.FIRST
        self._base, self._base_speed = start, 0.0  # the best width so far, and bytes a second with it
        self._undisturbed = False  # fewer were slower, and each connection kept its speed
        self._kept, self._kept_windows, self._narrow_next = 0, _KEPT_WINDOWS, False
        self._start_window(-math.inf)

    @property
    def width(self) -> int:
        """How many requests may be in flight now."""
        return self._width

    def record_finished(self, began: float, now: float, nbytes: int, *, full: bool) -> None:
        """Count a finished request. `full`: whether as many as allowed were in flight; others are ignored."""
        if not full or began <= self._since or now <= began:
            return
        self._bytes += nbytes
        self._seconds += now - began
        self._samples += 1
        if self._samples >= min(max(self._width, _SAMPLES_MIN), _SAMPLES_MAX):
            self._decide(self._width * self._bytes / self._seconds)
            self._start_window(now)

    def _start_window(self, now: float) -> None:
        """Start a new window; requests that began before it are ignored, since another number ran beside them."""
        self._since, self._bytes, self._seconds, self._samples = now, 0, 0.0, 0

    def _decide(self, speed: float) -> None:
        match self._phase:
            case _Phase.FIRST:
                self._base_speed = speed
                self._grow(4)
            case _Phase.GROWING:
                factor = self._width / self._base
                if speed >= self._base_speed * _FASTER:
                    self._undisturbed = speed >= _UNDISTURBED * factor * self._base_speed
                    self._base, self._base_speed, self._kept_windows = self._width, speed, _KEPT_WINDOWS
                    self._grow(4 if self._undisturbed else 2)
                elif factor > 2:
                    self._grow(2)
                else:
                    self._narrow()
            case _Phase.NARROWING:
                if speed >= self._base_speed * _AS_FAST:
                    # The base speed stays: a little lost at each step would add up.
                    self._base, self._undisturbed = self._width, False
                    self._narrow()
                else:
                    self._undisturbed = True  # from here on fewer are slower
                    self._keep()
            case _Phase.KEEPING:
                self._base_speed += (speed - self._base_speed) / 4
                self._kept += 1
                if self._kept >= self._kept_windows:
                    self._kept_windows = min(2 * self._kept_windows, _KEPT_WINDOWS_MAX)
                    self._narrow_next = not self._narrow_next
                    self._undisturbed = self._undisturbed and not self._narrow_next
                    if self._narrow_next:
                        self._narrow()
                    else:
                        self._grow(2)

    def _grow(self, factor: int) -> None:
        self._phase, self._width = _Phase.GROWING, min(self._base * factor, self._maximum)
        if self._width == self._base:
            self._narrow()

    def _narrow(self) -> None:
        self._phase, self._width = _Phase.NARROWING, max(self._base * 3 // 4, self._minimum)
        if self._undisturbed or self._width == self._base:
            self._keep()

    def _keep(self) -> None:
        self._phase, self._width, self._kept = _Phase.KEEPING, self._base, 0


_Result = TypeVar("_Result")

REQUESTS_MAX = 128
_REQUESTS_MIN = 2
_READS, _READS_S3 = 2, 8


class LimitedRequest:
    """A request in flight. `nbytes`: what it carried; 0 if it failed or is of another kind."""

    def __init__(self) -> None:
        self.nbytes = 0


class ConcurrencyLimit:
    """Bounds the requests in flight. Any thread. `adaptive`: finds the best number; None: always `maximum`."""

    def __init__(
        self, maximum: int, adaptive: AdaptiveLimit | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.maximum, self._adaptive, self._clock = maximum, adaptive, clock
        self._released = threading.Condition()
        self._in_flight = 0

    @property
    def width(self) -> int:
        """How many requests may be in flight now."""
        return self.maximum if self._adaptive is None else self._adaptive.width

    @contextmanager
    def request(self) -> Iterator[LimitedRequest]:
        """Wait until one more request may begin; it ends with the block."""
        with self._released:
            while self._in_flight >= self.width:
                self._released.wait()
            self._in_flight += 1
        request, began = LimitedRequest(), self._clock()
        try:
            yield request
        finally:
            now = self._clock()
            with self._released:
                before = self.width
                if self._adaptive is not None and request.nbytes:
                    self._adaptive.record_finished(began, now, request.nbytes, full=self._in_flight >= before)
                self._in_flight -= 1
                self._released.notify(1 + max(0, self.width - before))


class FailFastRequests:
    """Starts no request after one has failed, since a store that is gone fails each after many retries. Any thread."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def run(self, limit: ConcurrencyLimit, call: Callable[[LimitedRequest], _Result]) -> _Result:
        """Make the call once the limit allows it. Raises `CancelledError` after a failure or `cancel_pending`."""
        with limit.request() as request:
            if self._errors:
                raise CancelledError
            try:
                return call(request)
            except BaseException as error:
                self._errors.append(error)  # before the next one may begin
                raise

    def raise_if_failed(self) -> None:
        """Raise the error of the first request that failed, if any."""
        if self._errors:
            raise self._errors[0]

    def cancel_pending(self) -> None:
        """Cancel the requests that have not begun."""
        self._errors.append(CancelledError())


def write_limit(url: str, maximum: int | None = None) -> ConcurrencyLimit:
    """Return the limit for parts of uploads to the store at `url`. `maximum`: a user's; then nothing is measured."""
    if maximum is not None or not is_s3(url):
        return ConcurrencyLimit(maximum or parts_at_once(url))
    return _measured_limit(parts_at_once(url))


def read_limit(url: str, maximum: int | None = None) -> ConcurrencyLimit:
    """Return the limit for long reads from the store at `url`. `maximum`: as in `write_limit`."""
    if maximum is not None or not is_s3(url):
        return ConcurrencyLimit(maximum or _READS)
    return _s3_read_limit(url)


@functools.lru_cache(16)
def _s3_read_limit(url: str) -> ConcurrencyLimit:  # noqa: ARG001 - cached by URL: one process reads a run many times
    return _measured_limit(_READS_S3)


def _measured_limit(start: int) -> ConcurrencyLimit:
    return ConcurrencyLimit(REQUESTS_MAX, AdaptiveLimit(start, minimum=_REQUESTS_MIN, maximum=REQUESTS_MAX))
