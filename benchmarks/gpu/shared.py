"""Trainings, rates and the open Checkpointer, shared by the phases of one process and made at first use.

The state of 12 GB on the device and the 24 GB of locked memory of holdfast's two slots are made only once.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import torch

from benchmarks.gpu.device_training import DeviceTraining, Way, saved_by
from benchmarks.gpu.measured import Sizes
from benchmarks.gpu.windows import Windows

__all__ = ["Shared", "beside_torch", "free_host_bytes", "gb_per_second"]

_ROUNDS = 5


class Shared:
    """State shared by phases.

    Attributes:
        opening: For holdfast at size `large`: seconds until each slot has been used, and the slots' bytes.
    """

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.sizes, self.folder = sizes, folder
        self.opening: dict[str, float] = {}
        self.beside_before = 0
        self._trainings: dict[str, DeviceTraining] = {}
        self._rates: dict[str, float] = {}
        self._windows: Windows | None = None
        self._stack = contextlib.ExitStack()

    def training(self, size: str) -> DeviceTraining:
        """Return the training of size `large`, `small` or `tiny`."""
        if size not in self._trainings:
            self._trainings[size] = DeviceTraining(
                getattr(self.sizes, size), shutil.disk_usage(self.folder).free
            )
            torch.cuda.synchronize()
        return self._trainings[size]

    def rates(self) -> dict[str, float]:
        """Return GB/s of bare copies: `pinned` to pinned memory, `to_device` from it, `on_device`."""
        if not self._rates:
            nbytes = self.sizes.copy_bytes
            live = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            other = torch.empty_like(live)
            for name, to, of in (
                ("pinned", host, live),
                ("to_device", live, host),
                ("on_device", other, live),
            ):
                self._rates[name] = gb_per_second(to, of, _ROUNDS)
            del live, host, other
            torch.cuda.empty_cache()
        return self._rates

    def windows(self) -> Windows:
        """Return windows of the large training with holdfast's default strategy, both slots locked."""
        if self._windows is None:
            training = self.training("large")
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(torch.ones(1, device="cuda"))
            torch.cuda.synchronize()
            self.beside_before = beside_torch()
            begun = time.monotonic()
            saver = self._stack.enter_context(saved_by("default", training, self.folder, scaler=scaler))
            self._windows = self.windows_of(training, saver)
            self.opening = self._windows.open(begun)
        return self._windows

    def windows_of(self, training: DeviceTraining, saver: Way) -> Windows:
        """Return windows of any way to save."""
        return Windows(training, saver, self.rates()["pinned"], self.sizes.window_steps_min)

    @property
    def is_open(self) -> bool:
        """Whether `windows()` would return the open Checkpointer's."""
        return self._windows is not None

    def close(self) -> None:
        """Close the Checkpointer of `windows()`; a process may have only one."""
        self._windows = None
        self._stack.close()


def gb_per_second(to: torch.Tensor, of: torch.Tensor, rounds: int) -> float:
    """Return the median rate of bare copies, without the first round."""
    seconds = []
    for _ in range(1 + rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return round(of.nbytes / sorted(seconds[1:])[rounds // 2] / 1e9, 4)


def beside_torch() -> int:
    """Return the bytes in use on the device that are not torch's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def free_host_bytes() -> int:
    """Return the bytes of available host memory."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
