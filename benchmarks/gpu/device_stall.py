"""The cost of a save to the training: a window of steps that begins with one, against the same steps without.

The window begins with an idle device and ends when its last step is done. Before the next one the checkpoint is where
it goes, so that no save waits for the one before. The ways take turns, forwards and backwards.
"""

from __future__ import annotations

import shutil
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.device_training import STRATEGIES, DeviceTraining, Saver, saved_by
from benchmarks.gpu.measured import Measured, Sizes

__all__ = ["measure"]

_WARM_UP = 2  # saves: the first has no mirror unless a limit is set, the second takes memory for it
_WAYS = ("none", "default", "dcp", *(name for name in STRATEGIES if name != "default"))


def measure(measured: Measured, sizes: Sizes) -> None:
    training = DeviceTraining(sizes, shutil.disk_usage(measured.folder).free)
    measured.put(state_bytes=training.state_bytes, layers=training.layers, steps_in_a_window=sizes.every)
    windows: dict[str, list[float]] = {}
    calls: dict[str, list[float]] = {}
    declined: dict[str, int] = dict.fromkeys(_WAYS, 0)
    longest = 0.0
    for way in (*_WAYS, *reversed(_WAYS)):
        if measured.seconds_left() < 1.5 * longest:
            measured.leave_out(f"{way}, a turn", "no time was left")
            continue
        begun = time.monotonic()
        with saved_by(way, training, measured.folder) as saver:
            for number in range(_WARM_UP + max(2, sizes.steps // sizes.every)):
                taken, call_seconds, seconds = _window(training, saver, number, sizes.every)
                if number < _WARM_UP:
                    continue
                if taken:
                    windows.setdefault(way, []).append(seconds)
                    calls.setdefault(way, []).append(call_seconds)
                else:
                    declined[way] += 1
        longest = max(longest, time.monotonic() - begun)
        measured.put(ways=_ways(windows, calls, declined, training.state_bytes))


def _window(training: DeviceTraining, saver: Saver, number: int, steps: int) -> tuple[bool, float, float]:
    """Whether it was saved, the seconds in `save()`, and those of the window."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    taken = saver.save(number)
    call_seconds = time.perf_counter() - begun
    saver.before_update()
    for _ in range(steps):
        training.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    saver.wait_done()
    return taken, call_seconds, seconds


def _ways(
    windows: dict[str, list[float]], calls: dict[str, list[float]], declined: dict[str, int], state_bytes: int
) -> dict[str, Any]:
    without = statistics.median(windows["none"])
    stalls = {way: statistics.median(seconds) - without for way, seconds in windows.items()}
    return {
        way: {
            "windows_ms": [round(1e3 * seconds, 3) for seconds in windows[way]],
            "saves": len(windows[way]),
            "declined": declined[way],
            "save_call_ms": round(1e3 * statistics.median(calls[way]), 4),
            "stall_ms": round(1e3 * stall, 4),
            "stall_ms_per_gb": round(1e3 * stall / (state_bytes / 1e9), 4),
            # Of two differences: without a stall of DCP there is nothing to compare with.
            "of_dcp": round(stall / stalls["dcp"], 4) if stalls.get("dcp", 0) > 0 else None,
        }
        for way, stall in stalls.items()
    }
