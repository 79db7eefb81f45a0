"""Whether `save()` waits for the device, and what it allocates: for each strategy, with a GradScaler in the state."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import torch

from benchmarks.gpu.device_training import STRATEGIES, DeviceTraining, saved_by
from benchmarks.gpu.measured import Measured, Sizes

__all__ = ["measure"]

_WARM_UP = 3
_SLEEP_CYCLES = 500_000_000  # a quarter of a second and more, on any device


def measure(measured: Measured, sizes: Sizes) -> None:
    training = DeviceTraining(sizes, shutil.disk_usage(measured.folder).free)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones(1, device="cuda"))
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        with saved_by(strategy, training, measured.folder, scaler=scaler) as saver:
            for number in range(_WARM_UP):
                saver.save(number)
                saver.wait_done()
                training.step()
            torch.cuda.synchronize()
            before, on_host = _allocations(), _host_bytes()
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            queued: torch.cuda.Event = torch.cuda.current_stream().record_event()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                taken = saver.save(_WARM_UP)
                torch.cuda.set_sync_debug_mode("default")
            waited = queued.query()  # type: ignore[no-untyped-call]
            synchronised = [str(one.message) for one in said if "called a synchronizing" in str(one.message)]
            after = _allocations()
            saver.wait_done()
            found[strategy] = {
                "taken": taken,
                "waited_for_the_queue": waited,
                "synchronising_calls": len(synchronised),
                "device_allocations": after["allocation"] - before["allocation"],
                "device_segments": after["segment"] - before["segment"],
                "host_bytes": _host_bytes() - on_host,
            }
            measured.put(strategies=found)


def _allocations() -> dict[str, int]:
    """Tensors, and blocks that were taken from the driver for them, so far."""
    stats = torch.cuda.memory_stats()
    return {kind: int(stats.get(f"{kind}.all.allocated", 0)) for kind in ("allocation", "segment")}


def _host_bytes() -> int:
    """Pinned memory of torch's own."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
