"""The time from one step's end to the next one's, by the device's own clock, with a save every so many and without.

Eager, and through torch.compile(mode="reduce-overhead"), where the device replays recorded graphs.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import time
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu.device_training import DeviceTraining, saved_by
from benchmarks.gpu.measured import Measured, Sizes

__all__ = ["measure"]

_RUNS = ("none", "default", "default", "none")
_WARM_UP_SAVES = 2
_LONGER = 5  # than in other phases: a 99th percentile needs hundreds of steps


def measure(measured: Measured, sizes: Sizes) -> None:
    modes: dict[str, Any] = {}
    for mode in ("eager", "reduce-overhead"):
        if mode != "eager" and (reason := _no_compiler()):
            measured.leave_out(mode, reason)
            continue
        torch.cuda.empty_cache()
        training = DeviceTraining(sizes, shutil.disk_usage(measured.folder).free, compiled=mode != "eager")
        times: dict[str, list[float]] = {"none": [], "default": []}
        taken = declined = 0
        longest = 0.0
        for number, way in enumerate(_RUNS):
            if measured.seconds_left() < 1.5 * longest:
                measured.leave_out(f"{mode}, {way}, a turn", "no time was left")
                continue
            begun = time.monotonic()
            milliseconds, saves = _run(training, way, measured, sizes)
            longest = max(longest, time.monotonic() - begun)
            times[way] += milliseconds
            if way != "none":
                taken, declined = taken + saves.count(True), declined + saves.count(False)
            if number:
                modes[mode] = {**_percentiles(times), "saves": taken, "declined": declined}
                measured.put(modes=modes, every=sizes.every)
        del training


def _no_compiler() -> str:
    return "no package triton" if importlib.util.find_spec("triton") is None else ""


def _run(
    training: DeviceTraining, way: str, measured: Measured, sizes: Sizes
) -> tuple[list[float], list[bool]]:
    """Milliseconds of each step, and whether each save was taken."""
    saves: list[bool] = []
    with saved_by(way, training, measured.folder) as saver:
        for number in range(_WARM_UP_SAVES):
            training.step()
            saver.save(number)
            saver.wait_done()
        torch.cuda.synchronize()
        events = []
        for number in range(_LONGER * sizes.steps):
            training.step()
            if (number + 1) % sizes.every == 0:
                saves.append(saver.save(_WARM_UP_SAVES + number))
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            events.append(event)
        torch.cuda.synchronize()
        saver.wait_done()
    return [first.elapsed_time(second) for first, second in pairwise(events)], saves


def _percentiles(times: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, milliseconds in times.items():
        ordered = sorted(milliseconds)
        for percent in (50, 99):
            at = max(0, math.ceil(percent / 100 * len(ordered)) - 1)
            found[f"{way}_p{percent}_ms"] = round(ordered[at], 4)
        found[f"{way}_steps"] = len(ordered)
    without = found["none_p99_ms"]
    return found | {"p99_ratio": round(found["default_p99_ms"] / without, 4) if without else None}
