"""The accelerator of this process, as torch reports it: CUDA, ROCm (which torch calls CUDA as well) or XPU.

`torch.accelerator` and `torch.xpu` need torch 2.6. Capabilities that some devices lack are looked up by name
(`DeviceStream.memory`, `device_runtime`), never guessed from the kind of device.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Protocol

import torch

KINDS = ("cuda", "xpu")  # kinds of devices whose tensors can be saved


def kind() -> str | None:
    """Return the kind of accelerator that torch has initialized in this process; None without one."""
    for one in KINDS:
        module = getattr(torch, one, None)
        if module is not None and module.is_initialized():
            return one
    return None


def module_of(kind_or_device: str | torch.device) -> Any:
    """Return `torch.cuda` or `torch.xpu`."""
    return getattr(torch, kind_or_device.type if isinstance(kind_or_device, torch.device) else kind_or_device)


def own_device() -> torch.device | None:
    """Return the device that this rank trains on; None if no device is in use. If this process has memory on exactly
    one device, it is that one, as for scripts that write `device="cuda:1"`; otherwise it is the current device.
    """
    one = kind()
    if one is None:
        return None
    module = module_of(one)
    used = [index for index in range(module.device_count()) if module.memory_reserved(index)]
    return torch.device(one, used[0] if len(used) == 1 else module.current_device())


class StreamEvent(Protocol):
    """A marker in a stream."""

    def synchronize(self) -> None:
        """Wait until the device has reached the marker."""

    def query(self) -> bool:
        """Whether the device has reached the marker."""


def record_event(device: torch.device) -> StreamEvent:
    """Put a marker into the current stream of a device."""
    event: StreamEvent = module_of(device).Event(**_event_options(device.type))
    module_of(device).current_stream(device).record_event(event)
    return event


def copy_to_host(memory: torch.Tensor) -> tuple[torch.Tensor, StreamEvent | None]:
    """Copy a small tensor to host memory on its device's current stream; return the copy and the event of its arrival.
    A tensor in host memory is returned as it is, without an event.
    """
    if memory.device.type == "cpu":
        return memory, None
    here = torch.empty(memory.shape, dtype=memory.dtype, device="cpu", pin_memory=True)
    here.copy_(memory, non_blocking=True)
    return here, record_event(memory.device)


@functools.cache
def _event_options(one: str) -> dict[str, bool]:
    # Wait without keeping a core busy: an option of CUDA and ROCm, the only way of XPU.
    parameters = inspect.signature(module_of(one).Event.__new__).parameters
    return {"blocking": True} if "blocking" in parameters else {}


def is_capturing() -> bool:
    """Whether this thread is recording a graph: queued work then runs at each replay, not now."""
    one = kind()
    asked = None if one is None else getattr(module_of(one), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())
