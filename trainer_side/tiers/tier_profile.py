"""The number of checkpoints in flight and of writers for each that suit a device (PCcheck, ASPLOS 2025, section 3.4).

    for N in flight, p writers each:   N slices are written at once, each flushed at its end: T_w seconds
    best: the least T_w / N; of those that are nearly as good, the fewest in flight, then the fewest writers

The device is measured with a file of its own beside the slots, which has no name by then, so a kill leaves nothing. The
measurement is bounded in bytes and in seconds, and its result is kept in the slot file. Settings are not measured.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from trainer_side.tiers.media import Medium

SCRATCH_BYTES = 64 << 20
_BLOCK_BYTES = 8 << 20  # the size of one write: like a frame, which is half a chunk or more
_SECONDS_MAX = 1.0
_NEARLY = 1.05


class TierProfile(NamedTuple):
    """`in_flight`: slices written at once. `writers`: threads for each."""

    in_flight: int
    writers: int


def choose(seconds: Mapping[TierProfile, float]) -> TierProfile:
    """The best profile, by the seconds until all its slices were written."""
    per_slice = {profile: elapsed / profile.in_flight for profile, elapsed in seconds.items()}
    good_enough = min(per_slice.values()) * _NEARLY
    return min(profile for profile, elapsed in per_slice.items() if elapsed <= good_enough)


def measure(
    medium: Medium,
    candidates: Sequence[TierProfile],
    *,
    clock: Callable[[], float] = time.monotonic,
    seconds_max: float = _SECONDS_MAX,
) -> TierProfile:
    """Write with each candidate in turn, and choose. The first one is always tried, the others while there is time.

    Args:
        medium: A medium of `SCRATCH_BYTES`, all of which is written over.
        candidates: The profiles to try, in this order.
        clock: Seconds.
        seconds_max: After this time no further candidate is tried.

    Raises:
        StoreError: The device refused.
    """
    seconds: dict[TierProfile, float] = {}
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        block[:] = os.urandom(1 << 20) * (_BLOCK_BYTES >> 20)  # a device may be quicker with zeros
        with memoryview(block) as view:
            _write(medium, view, TierProfile(1, 1))  # first touch of the file, which takes longer
            begun = clock()
            for profile in candidates:
                started = clock()
                if seconds and started - begun > seconds_max:
                    break
                _write(medium, view, profile)
                seconds[profile] = (clock() - started) / _blocks_per_slice(profile)
    return choose(seconds)


def _blocks_per_slice(profile: TierProfile) -> int:
    return SCRATCH_BYTES // _BLOCK_BYTES // profile.in_flight


def _write(medium: Medium, view: memoryview, profile: TierProfile) -> None:
    """All slices of a profile at once; together about `SCRATCH_BYTES`."""
    blocks = _blocks_per_slice(profile)

    def one_slice(number: int) -> None:
        left = iter(range(number * blocks, (number + 1) * blocks))
        taking = threading.Lock()

        def writer(_: int) -> None:
            while True:
                with taking:
                    block = next(left, None)
                if block is None:
                    return
                medium.write(block * _BLOCK_BYTES, view)

        with ThreadPoolExecutor(profile.writers) as writers:
            list(writers.map(writer, range(profile.writers)))
        medium.flush()

    with ThreadPoolExecutor(profile.in_flight) as slices:
        list(slices.map(one_slice, range(profile.in_flight)))
