"""The accelerator of this process, as torch reports it: CUDA, ROCm (which torch calls CUDA as well) or XPU.

Floors: `torch.accelerator` and `torch.xpu` came with torch 2.6. A capability that some devices lack is looked up by
name (`DeviceStream.memory`, `device_runtime`), never guessed from the kind of device.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Protocol

import torch

KINDS = ("cuda", "xpu")  # those whose tensors can be saved


def kind() -> str | None:
    """The kind of accelerator that torch has been used with in this process; None: host memory is all there is."""
    for one in KINDS:
        module = getattr(torch, one, None)
        if module is not None and module.is_initialized():
            return one
    return None


def module_of(kind_or_device: str | torch.device) -> Any:
    """`torch.cuda`, or what corresponds to it."""
    return getattr(torch, kind_or_device.type if isinstance(kind_or_device, torch.device) else kind_or_device)


def own_device() -> torch.device | None:
    """The device that this rank trains on; None: no device is in use.

    It is the only one with memory of this process; where there are several, or none yet, the current one. Scripts that
    write `device="cuda:1"` without `torch.cuda.set_device` are understood, too.
    """
    one = kind()
    if one is None:
        return None
    module = module_of(one)
    used = [index for index in range(module.device_count()) if module.memory_reserved(index)]
    return torch.device(one, used[0] if len(used) == 1 else module.current_device())


class StreamEvent(Protocol):
    """A place in a stream, which the device comes to."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""

    def query(self) -> bool:
        """Whether the device has come there."""


def record(device: torch.device) -> StreamEvent:
    """Where the current stream of a device is now."""
    event: StreamEvent = module_of(device).Event(**_event_options(device.type))
    module_of(device).current_stream(device).record_event(event)
    return event


def brought(memory: torch.Tensor) -> tuple[torch.Tensor, StreamEvent | None]:
    """A small tensor in host memory, and when it is there; queued on the current stream of its own device."""
    if memory.device.type == "cpu":
        return memory, None
    here = torch.empty(memory.shape, dtype=memory.dtype, device="cpu", pin_memory=True)
    here.copy_(memory, non_blocking=True)
    return here, record(memory.device)


@functools.cache
def _event_options(one: str) -> dict[str, bool]:
    # A wait that does not keep a core busy: CUDA and ROCm must be asked for it, XPU has no other.
    parameters = inspect.signature(module_of(one).Event.__new__).parameters
    return {"blocking": True} if "blocking" in parameters else {}


def is_capturing() -> bool:
    """Whether this thread is recording a graph: what it queues now runs at each replay, not now."""
    one = kind()
    asked = None if one is None else getattr(module_of(one), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())
