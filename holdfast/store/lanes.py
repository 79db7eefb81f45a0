"""Lanes to a store: so many requests at once as bring something, each way, for all that this process does there.

disk, NFS: fixed            any fsspec store: fixed            S3: found by measurement (lane_width.py), to 128
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
from holdfast.store.lane_width import LaneWidth

_Result = TypeVar("_Result")

LANES_MAX = 128
_LANES_MIN = 2
_READS, _READS_S3 = 2, 8


class LaneUse:
    """One request's. `nbytes`: what it has carried; one that failed, or is of another kind, leaves it at 0."""

    def __init__(self) -> None:
        self.nbytes = 0


class Lanes:
    """Lets so many requests through at once. May be used from any thread.

    Args:
        most: How many at most.
        found: Finds how many are best; None: always `most`.
        clock: Gives seconds.
    """

    def __init__(
        self, most: int, found: LaneWidth | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most, self._found, self._clock = most, found, clock
        self._free = threading.Condition()
        self._taken = 0

    @property
    def width(self) -> int:
        """How many requests may be under way now."""
        return self.most if self._found is None else self._found.width

    @contextmanager
    def lane(self) -> Iterator[LaneUse]:
        """Wait for a lane, and hold it for one request."""
        with self._free:
            while self._taken >= self.width:
                self._free.wait()
            self._taken += 1
        lane, began = LaneUse(), self._clock()
        try:
            yield lane
        finally:
            now = self._clock()
            with self._free:
                before = self.width
                if self._found is not None and lane.nbytes:
                    self._found.ended(began, now, lane.nbytes, full=self._taken >= before)
                self._taken -= 1
                self._free.notify(1 + max(0, self.width - before))


class LanesUntilFailure:
    """Requests in lanes, of which none begins any more once one has failed. May be used from any thread.

    A store that is gone lets every request fail only after many tries; those that wait for a lane would add theirs.
    """

    def __init__(self) -> None:
        self._over: list[BaseException] = []

    def run(self, lanes: Lanes, request: Callable[[LaneUse], _Result]) -> _Result:
        """Wait for a lane, and do `request` in it.

        Raises:
            CancelledError: Another one had failed before, or it is over.
        """
        with lanes.lane() as lane:
            if self._over:
                raise CancelledError
            try:
                return request(lane)
            except BaseException as error:
                self._over.append(error)  # before the lane is free
                raise

    def check(self) -> None:
        """Raise what the first one that failed has raised, if one has."""
        if self._over:
            raise self._over[0]

    def end(self) -> None:
        """Nobody wants the answers of those that have not begun."""
        self._over.append(CancelledError())


def writing(url: str, most: int | None = None) -> Lanes:
    """Lanes for the parts of uploads to the store at `url`.

    Args:
        url: The run.
        most: A number that somebody has set: it is kept to, and nothing is measured.
    """
    if most is not None or not is_s3(url):
        return Lanes(most or parts_at_once(url))
    return Lanes(LANES_MAX, LaneWidth(parts_at_once(url), least=_LANES_MIN, most=LANES_MAX))


def reading(url: str, most: int | None = None) -> Lanes:
    """The same for long reads from it."""
    if most is not None or not is_s3(url):
        return Lanes(most or _READS)
    return _reading_s3(url)


@functools.lru_cache(16)
def _reading_s3(url: str) -> Lanes:  # noqa: ARG001 - what was found is kept: a tool and a flusher read one run many times
    return Lanes(LANES_MAX, LaneWidth(_READS_S3, least=_LANES_MIN, most=LANES_MAX))
