"""Checks whether `save()` waits for the device, what it allocates and maps, and how many operators it calls.

The strategy `default` uses the large state if it is still open, the others use the tiny one, each with a GradScaler.
Then the call and the stall are measured for a state of many small tensors.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.device_training import STRATEGIES, ManySmallTensors, saved_by
from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.shared import Shared, beside_torch
from benchmarks.gpu.windows import FEW, Windows

__all__ = ["measure"]

_WARM_UP = 3
_SLEEP_CYCLES = 500_000_000  # a quarter of a second and more, on any device
_MANY_SECONDS_MAX = 4.0
_COPIES = ("aten::copy_", "aten::_foreach_copy_", "aten::cat", "aten::stack")


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:
    found: dict[str, Any] = {}
    measured.put(strategies=found)
    if shared.is_open:
        found["default"] = _one_save(shared.windows())
        measured.put(strategies=found)
    shared.close()
    _many_small_tensors(measured, sizes, shared)
    training = shared.training("tiny")
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones(1, device="cuda"))
    for strategy in STRATEGIES:
        if strategy in found:
            continue
        with saved_by(strategy, training, measured.folder, scaler=scaler) as saver:
            windows = shared.windows_of(training, saver)
            for _ in range(_WARM_UP):
                windows.save()
                saver.wait_done()
                training.step()
            found[strategy] = _one_save(windows)
            measured.put(strategies=found)


def _many_small_tensors(measured: Measured, sizes: Sizes, shared: Shared) -> None:
    training = ManySmallTensors(sizes.small_tensors, sizes.small_bytes)
    figures: dict[str, Any] = {"tensors": sizes.small_tensors, "state_bytes": training.state_bytes}
    begun = time.monotonic()
    with saved_by("default", training, measured.folder) as saver:
        windows = shared.windows_of(training, saver)
        figures |= windows.open(begun)
        windows.measure(FEW, time.monotonic() + _MANY_SECONDS_MAX)
        figures |= windows.figures()
        measured.put(many=figures)
        measured.put(many=figures | windows.kept())


def _one_save(windows: Windows) -> dict[str, Any]:
    """Save while the device is busy with queued work, then save once more under a profiler."""
    torch.cuda.synchronize()
    before, on_host, beside = _allocations(), _host_bytes(), beside_torch()
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    queued: torch.cuda.Event = torch.cuda.current_stream().record_event()
    with _synchronising() as said:
        taken = windows.save()
    waited = queued.query()  # type: ignore[no-untyped-call]
    after, mapped = _allocations(), beside_torch() - beside
    windows.saver.wait_done()
    figures = {
        "state_bytes": windows.training.state_bytes,
        "taken": taken,
        "waited_for_the_queue": waited,
        "synchronising_calls": len(said),
        "device_allocations": after["allocation"] - before["allocation"],
        "device_segments": after["segment"] - before["segment"],
        "mapped_bytes": max(0, mapped - (after["reserved"] - before["reserved"])),
        "host_bytes": _host_bytes() - on_host,
    }
    windows.training.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        windows.save()
    windows.saver.wait_done()
    # Only this thread's events: the copy thread may run by then.
    called = Counter(event.name for event in seen.events() if event.name.startswith("aten::"))
    return figures | {
        "operators": sum(called.values()),
        "copying_operators": {name: called[name] for name in _COPIES if called[name]},
    }


@contextmanager
def _synchronising() -> Iterator[list[str]]:
    """Collect the calls in this block that torch reports as waiting for the device."""
    calls: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield calls
        finally:
            torch.cuda.set_sync_debug_mode("default")
            calls += [str(one.message) for one in said if "called a synchronizing" in str(one.message)]


def _allocations() -> dict[str, int]:
    """Count allocated tensors, blocks taken from the driver, and the bytes of those blocks."""
    stats = torch.cuda.memory_stats()
    counts = {kind: int(stats.get(f"{kind}.all.allocated", 0)) for kind in ("allocation", "segment")}
    return {**counts, "reserved": torch.cuda.memory_reserved()}


def _host_bytes() -> int:
    """Return the bytes of torch's own pinned memory."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
