"""Numbers that a device still has to compute, in a tree that is to be saved: `save()` does not wait for them.

    {"scale": «arriving», "growth_factor": 2.0, …}  ─► copy thread: {"scale": 65536.0, …} ─► data.pkl

torch's `GradScaler.state_dict()` asks the device for two numbers, and so waits for all that is queued there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer_side.state.accelerator import brought


class Arriving:
    """A number on its way from a device, as it is at this point of the current stream.

    Args:
        tensor: It, without dimensions.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here, self._event = brought(tensor.detach())

    def value(self) -> Any:
        """The number; waits for it. Any thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._here.item()


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """As `scaler.state_dict()`, with numbers that arrive where that would wait for a device. Training thread."""
    scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    # A subclass may save something else; before the first batch there are no tensors.
    known = scaler.is_enabled() and type(scaler).state_dict is torch.amp.GradScaler.state_dict
    if (
        known
        and isinstance(scale, torch.Tensor)
        and isinstance(tracker, torch.Tensor)
        and scale.device.type != "cpu"
    ):
        return {
            "scale": Arriving(scale),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": Arriving(tracker),
        }
    return dict(scaler.state_dict())


def settle(tree: Mapping[str, Any]) -> None:
    """Wait for what is on its way in a tree: it is at the top level, or right below. In place; any thread."""
    for below in tree.values():
        if type(below) is dict:
            for key, value in below.items():
                if type(value) is Arriving:
                    below[key] = value.value()
