"""Measures the time between step ends by the device's own clock, with a save every few steps and without."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.shared import Shared
from benchmarks.gpu.windows import Windows

__all__ = ["measure"]

_RUNS = ("none", "saved", "saved", "none")
_WARM_UP = 2


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:
    windows = shared.windows()
    times: dict[str, list[float]] = {"none": [], "saved": []}
    saves: list[bool] = []
    steps = max(sizes.every, sizes.steps // 2)
    for number, way in enumerate(_RUNS):
        milliseconds, taken = _run(windows, steps, sizes.every if way == "saved" else 0)
        times[way] += milliseconds
        saves += taken
        if number:
            measured.put(
                **_percentiles(times),
                saves=saves.count(True),
                declined=saves.count(False),
                every=sizes.every,
                state_bytes=windows.training.state_bytes,
            )


def _run(windows: Windows, steps: int, every: int) -> tuple[list[float], list[bool]]:
    """Return milliseconds of each step, and whether each save was accepted."""
    for _ in range(_WARM_UP):
        windows.training.step()
    torch.cuda.synchronize()
    saves, events = [], []
    for number in range(steps + 1):
        windows.training.step()
        if every and number % every == every - 1:
            saves.append(windows.save())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)
    torch.cuda.synchronize()
    windows.saver.wait_done()
    return [first.elapsed_time(second) for first, second in pairwise(events)], saves


def _percentiles(times: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, milliseconds in times.items():
        ordered = sorted(milliseconds)
        for percent in (50, 99):
            at = max(0, math.ceil(percent / 100 * len(ordered)) - 1)
            found[f"{way}_p{percent}_ms"] = round(ordered[at], 4)
        found[f"{way}_steps"] = len(ordered)
        found[f"{way}_ms"] = [round(one, 3) for one in milliseconds]
    without = found["none_p99_ms"]
    return found | {"p99_ratio": round(found["saved_p99_ms"] / without, 4) if without else None}
