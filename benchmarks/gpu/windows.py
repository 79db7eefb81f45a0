"""Measures the cost of a save to the training: windows of steps with a save, alternating with windows without one.

    none     N steps
    idle     a save, N steps             the device is idle when `save()` is called
    queued   2 steps, a save, N-2 steps  as in a loop that never waits for the device: the host is ahead of it

The device is idle at both ends of a window. A window only begins when the last checkpoint is done, so no save waits for
another one.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from typing import Any

import torch

from benchmarks.gpu.device_training import DeviceTraining, Way, differing, paths_of, tensors_of

__all__ = ["BARE", "FEW", "MANY", "Windows"]

_EARLY_STEPS = 2
_STEPS_TIMED = 4
_STEPS_MAX = 14
_COPIES = 1.6  # a window is as long as this many bare copies of the state, so it contains the wait for one
_LOOK_SECONDS = 3e-4
_KEPT_SECONDS_MAX = 10.0
_KINDS = {"n": "none", "i": "idle", "q": "queued"}
MANY, FEW, BARE = "niqniqni", "niqni", "n"


class Windows:
    """The windows of one way."""

    def __init__(self, training: DeviceTraining, saver: Way, gb_per_second: float, steps_min: int) -> None:
        self.training, self.saver = training, saver
        self._number = -1
        self._windows: dict[str, list[float]] = {kind: [] for kind in _KINDS.values()}
        self._calls: dict[str, list[float]] = {kind: [] for kind in _KINDS.values()}
        self._declined = 0
        self._steps = max(steps_min, self._steps_of_a_copy(gb_per_second))

    def _steps_of_a_copy(self, gb_per_second: float) -> int:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(_STEPS_TIMED):
            self.training.step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / _STEPS_TIMED
        copies = _COPIES * self.training.state_bytes / (gb_per_second * 1e9) / seconds
        return min(_STEPS_MAX, math.ceil(copies) + _EARLY_STEPS)

    def open(self, begun: float) -> dict[str, float]:
        """Save until all memory of the way has been used once; `begun`: when its construction began."""
        for number in range(self.saver.warm_ups):
            self._window("idle", counts=False)
            if number == 0:
                self.saver.wait_made()
        self._declined = 0
        return {"open_seconds": round(time.monotonic() - begun, 3), "host_bytes": self.saver.host_bytes()}

    def save(self) -> bool:
        """Save with the next step number; return whether the save was accepted."""
        self._number += 1
        return self.saver.save(self._number)

    def measure(self, pattern: str, until: float) -> bool:
        """Run windows in this order while another one as long as the longest fits; return whether all did."""
        longest = 0.0
        for letter in pattern:
            begun = time.monotonic()
            if begun + longest > until and self._windows["none"] and self._windows["idle"]:
                return False
            self._window(_KINDS[letter])
            longest = max(longest, time.monotonic() - begun)
        return True

    def _window(self, kind: str, *, counts: bool = True) -> None:
        early = _EARLY_STEPS if kind == "queued" else 0
        call_seconds, taken = 0.0, True
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(early):
            self.training.step()
        if kind != "none":
            called = time.perf_counter()
            taken = self.save()
            call_seconds = time.perf_counter() - called
        self._train(self._steps - early)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        self.saver.wait_done()
        if not taken:
            self._declined += 1
        elif counts:
            self._windows[kind].append(seconds)
            self._calls[kind].append(call_seconds)

    def _train(self, steps: int) -> None:
        """Run steps, with the way's hooks before and after each update."""
        hooks = [
            self.training.optimizer.register_step_pre_hook(lambda *_: self.saver.before_update()),
            self.training.optimizer.register_step_post_hook(lambda *_: self.saver.after_update()),
        ]
        try:
            for _ in range(steps):
                self.training.step()
        finally:
            for hook in hooks:
                hook.remove()

    def figures(self) -> dict[str, Any]:
        """Return the figures of the windows so far."""
        none, gb = _milliseconds(self._windows["none"]), self.training.state_bytes / 1e9
        found: dict[str, Any] = {}
        for kind, name in (("idle", "stall"), ("queued", "stall_queued")):
            with_save = _milliseconds(self._windows[kind])
            stall = None if none is None or with_save is None else round(with_save - none, 3)
            found[f"{name}_ms"] = stall
            found[f"{name}_ms_per_gb"] = None if stall is None else round(stall / gb, 4)
        without = self._windows["none"]
        return {
            "saves": len(self._windows["idle"]) + len(self._windows["queued"]),
            "declined": self._declined,
            "call_ms": _milliseconds(self._calls["idle"]),
            "call_queued_ms": _milliseconds(self._calls["queued"]),
            **found,
            "none_ms": none,
            "none_spread_ms": round(1e3 * (max(without) - min(without)), 3) if without else None,
            "steps_in_a_window": self._steps,
            "windows_ms": {kind: [round(1e3 * one, 3) for one in of] for kind, of in self._windows.items()},
            "calls_ms": {
                kind: [round(1e3 * one, 3) for one in of]
                for kind, of in self._calls.items()
                if kind != "none"
            },
        }

    def kept(self) -> dict[str, Any]:
        """Save outside of the windows; return the seconds until the copy is complete in host memory, and the device
        memory that the save takes beyond the training's."""
        torch.cuda.synchronize()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        least, copied_at, done = [free], [0.0], threading.Event()

        def look() -> None:
            while not done.is_set():
                least.append(min(least.pop(), torch.cuda.mem_get_info()[0]))
                if not copied_at[0] and self.saver.copied():
                    copied_at[0] = time.perf_counter()
                time.sleep(_LOOK_SECONDS)

        begun = time.perf_counter()
        taken = self.save()
        called = time.perf_counter()
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        self._train(self._steps)
        torch.cuda.synchronize()
        self.saver.wait_done()
        deadline = time.monotonic() + _KEPT_SECONDS_MAX
        while not copied_at[0] and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        done.set()
        looking.join()
        if not taken or not copied_at[0]:
            return {"copy_seconds": None}
        of_torch = torch.cuda.memory_reserved() - reserved
        return {
            "copy_seconds": round(max(called, copied_at[0]) - begun, 4),
            "device_extra_bytes": max(0, free - least[0] - of_torch),
        }

    def compared(self) -> dict[str, Any]:
        """Compare a save with clones taken at its call, with steps queued before and after it."""
        paths = paths_of(self.training)
        torch.cuda.synchronize()
        for _ in range(_EARLY_STEPS):
            self.training.step()
        clones = [tensor.detach().clone() for tensor in tensors_of(self.training)]
        begun = time.perf_counter()
        taken = self.save()
        call_seconds = time.perf_counter() - begun
        self._train(self._steps)
        torch.cuda.synchronize()
        self.saver.wait_done()
        if not taken:
            return {"consistent": "declined"}
        changed = len(differing(paths, tensors_of(self.training), clones))
        found, seconds = self.saver.found(paths, self._number)
        read_back = {"read_back_seconds": round(seconds, 3)} if seconds else {}
        wrong = differing(paths, found, clones)
        return {
            "compared_call_ms": round(1e3 * call_seconds, 3),
            "consistent": "yes" if not wrong else f"no: {len(wrong)} of {len(paths)} tensors",
            "tensors": len(paths),
            "changed_meanwhile": changed,
            "differing": wrong[:3],
            **read_back,
        }


def _milliseconds(seconds: list[float]) -> float | None:
    return round(1e3 * statistics.median(seconds), 3) if seconds else None
