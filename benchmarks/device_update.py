"""An AdamW update that takes a given time and leaves the CPU idle, as if a device ran it.

The optimizer's own step, hooks and pieces run; a wait in proportion to a piece's bytes replaces the arithmetic. The
state does not change.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from benchmarks.workload import Workload

__all__ = ["install"]


def install(workload: Workload, seconds: float) -> None:
    """From now on in this process, make an update of all parameters of `workload` take `seconds`."""
    gradient = _split_gradient if workload.is_sharded else _gradient
    for parameter in workload.model.parameters():
        parameter.grad = gradient(parameter)
    workload.keeps_gradients = True
    per_element = seconds / workload.parameters

    def update(parameters: list[torch.Tensor], *_: Any, **__: Any) -> None:
        time.sleep(per_element * sum(parameter.numel() for parameter in parameters))

    # Imported by name: in `torch.optim` the name `adam` is not the module.
    importlib.import_module("torch.optim.adam").__dict__["adam"] = update


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros, which take no memory."""
    return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


def _split_gradient(parameter: torch.Tensor) -> torch.Tensor:
    # Imported here: a start is measured, too, and a script without split state does not pay for this.
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return _gradient(parameter)
    part = _gradient(parameter.to_local())
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)
