"""The gate: an optimizer may not overwrite what is still being copied.

    save(step) ── close ──► copy thread copies ──► open
    forward, backward go on …        optimizer.step() waits here, and only while the copy is under way

A hook on each optimizer (`register_step_pre_hook`) waits; the training loop is not changed. The gate is coarse: one
copy, all optimizers. (Two-phase checkpointing as in CheckFreq, FAST 2021: the update waits for the snapshot.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Gate"]


class Gate:
    """Holds back `optimizer.step()` while a copy is under way.

    Made and closed by the training thread; opened by the copy thread.

    Args:
        optimizers: Those whose parameters and state are copied behind the gate.
        clock: Monotonic seconds.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._opened = threading.Event()
        self._opened.set()
        self._waiting: dict[int, float] = {}  # thread → since when
        self._waited_seconds = 0.0
        self._lock = threading.Lock()
        self._hooks = [optimizer.register_step_pre_hook(self._hook) for optimizer in optimizers]

    @property
    def closed(self) -> bool:
        """Whether a copy is under way."""
        return not self._opened.is_set()

    def close(self) -> None:
        """Shut the gate, from `save()` on. Training thread only."""
        with self._lock:
            self._waited_seconds = 0.0
        self._opened.clear()

    def open(self) -> float:
        """Let updates pass; returns for how many seconds the training thread was held back. Any thread."""
        with self._lock:
            waited = self._waited_seconds
            now = self._clock() if self._waiting else 0.0
            waited += sum(now - since for since in self._waiting.values())
            self._opened.set()
        return waited

    def wait(self) -> None:
        """Return when no copy is under way. Called by the hook.

        Call it yourself before changing parameters by other means than `optimizer.step()` (weight averaging in place,
        loading weights).
        """
        if self._opened.is_set():
            return
        thread = threading.get_ident()
        with self._lock:
            self._waiting[thread] = self._clock()
        try:
            self._opened.wait()
        finally:
            with self._lock:
                self._waited_seconds += self._clock() - self._waiting.pop(thread)

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(
        self, _optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> None:
        self.wait()
