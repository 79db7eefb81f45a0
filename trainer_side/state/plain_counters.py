"""Shows `holdfast drill` the numbers on modules that no `state_dict()` has, such as `self.calls` of a `forward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast import supervised as diary

_ATTRIBUTES_MAX = 10_000


class PlainCounters:
    """Notes these numbers at each step, if this process is in a drill. Training thread.

    Args:
        state: Names mapped to objects, as the checkpoints have them.
        rank: This rank; only rank 0 writes.
    """

    def __init__(self, state: Mapping[str, Any], *, rank: int) -> None:
        self._state, self._wanted = state, rank == 0 and diary.is_drilled()
        self._before: dict[str, float] | None = None

    def note(self, step: int) -> None:
        if not self._wanted:
            return
        now, before = dict(_numbers(self._state)), self._before or {}
        changed = {path: number for path, number in now.items() if before.get(path) != number}
        # A new process begins with all of them.
        diary.note("counters", {"step": step, "begins": self._before is None, "values": changed})
        self._before = now


def _numbers(state: Mapping[str, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in state.items():
        if not isinstance(value, torch.nn.Module):
            continue
        for prefix, module in value.named_modules():
            where = f"{name}/{prefix}." if prefix else f"{name}/"
            for key, number in vars(module).items():
                if type(number) in (int, float) and not key.startswith("_"):
                    found.append((where + key, number))
            if len(found) > _ATTRIBUTES_MAX:
                return found
    return found
