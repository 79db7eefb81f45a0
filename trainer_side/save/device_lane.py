"""The calls to one device that a copy needs, the same for CUDA, ROCm and XPU.

    current stream   the training's: what is queued here at `save()` is of that moment, and updates come after
    own stream       the project's: copies to the host, behind an event, beside the training

The own stream is made by the runtime itself and kept as long as the process. `torch.cuda.Stream()` deals 32 streams to
all who ask, so one of those would be the user's as well. XPU has no other: there it is one of torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from trainer_side.save.device_runtime import device_runtime
from trainer_side.save.host_memory import locked_buffer
from trainer_side.state.accelerator import StreamEvent, module_of, record


class DeviceMemory(NamedTuple):
    """The memory of a device, in bytes.

    Attributes:
        free: What an allocation could take, what torch keeps for later among it.
        total: Of the device.
        allocated: In tensors of this process. `peak`: the most so far.
        retries: So many times torch had to give memory back to the device before there was enough.
    """

    free: int
    total: int
    allocated: int
    peak: int
    retries: int


class DeviceLane(Protocol):
    """The calls to a device that a copy needs."""

    def beside(self, after: StreamEvent | None) -> AbstractContextManager[None]:
        """Work of this thread goes to a stream of its own meanwhile, behind `after`."""
        ...

    def record(self) -> StreamEvent:
        """Where the current stream is now."""
        ...

    def on_device(self, nbytes: int) -> torch.Tensor:
        """Memory of the current stream.

        Raises:
            OutOfMemoryError: There is none.
        """
        ...

    def aside(self, nbytes: int) -> torch.Tensor | None:
        """Memory of the own stream, beside all that torch keeps; None: there is none, or no way to take it so."""
        ...

    def give_back(self, aside: torch.Tensor) -> None:
        """What `aside` gave belongs to the device again, when this returns."""
        ...

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device can copy into without stopping the CPU."""
        ...

    def memory(self) -> DeviceMemory | None:
        """None: it cannot be measured."""
        ...


class AcceleratorLane:
    """The lane of one device.

    Args:
        device: It.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._stream = _own_stream(device)

    @contextmanager
    def beside(self, after: StreamEvent | None) -> Iterator[None]:
        """As `DeviceLane`."""
        if after is not None:
            self._stream.wait_event(after)
        with self._module.stream(self._stream):
            yield

    def record(self) -> StreamEvent:
        """As `DeviceLane`."""
        return record(self._device)

    def on_device(self, nbytes: int) -> torch.Tensor:
        """As `DeviceLane`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def aside(self, nbytes: int) -> torch.Tensor | None:
        """As `DeviceLane`."""
        runtime, stream = device_runtime(), self._stream_handle()
        if runtime is None or stream is None or (address := runtime.allocate(nbytes, stream)) is None:
            return None
        return torch.as_tensor(_DeviceBytes(address, nbytes), device=self._device)

    def give_back(self, aside: torch.Tensor) -> None:
        """As `DeviceLane`."""
        runtime, stream = device_runtime(), self._stream_handle()
        assert runtime is not None, "it has given the memory"
        assert stream is not None
        runtime.free(aside.data_ptr(), stream)
        with self.beside(None):
            self.record().synchronize()

    def on_host(self, nbytes: int) -> torch.Tensor:
        """As `DeviceLane`."""
        return locked_buffer(max(1, nbytes))

    def memory(self) -> DeviceMemory | None:
        """As `DeviceLane`."""
        if not hasattr(self._module, "mem_get_info"):
            return None
        free, total = self._module.mem_get_info(self._device)
        stats = self._module.memory_stats(self._device)
        allocated = int(stats.get("allocated_bytes.all.current", 0))
        kept = int(stats.get("reserved_bytes.all.current", 0)) - allocated
        peak, retries = stats.get("allocated_bytes.all.peak", 0), stats.get("num_alloc_retries", 0)
        return DeviceMemory(int(free) + kept, int(total), allocated, int(peak), int(retries))

    def _stream_handle(self) -> int | None:
        handle: int | None = getattr(self._stream, "cuda_stream", None)
        return handle


class _DeviceBytes:
    """Memory of a device as torch takes it over from others, by CUDA's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@functools.cache
def lane_of(device: torch.device) -> AcceleratorLane:
    """The lane of a device. Any thread."""
    return AcceleratorLane(device)


@contextmanager
def in_order_with(device: torch.device, others: Iterable[Any]) -> Iterator[None]:
    """What is queued on the current stream meanwhile comes behind the streams `others`, and they go on behind it.

    So a `save()` on another stream than the training's saves what the training has queued. On the training's own, all
    of these are that one, and nothing is done.
    """
    module = module_of(device)
    current = module.current_stream(device)
    streams = [module.default_stream(device)] if hasattr(module, "default_stream") else []
    for stream in others:
        if stream.device == device and stream not in streams:
            streams.append(stream)
    streams = [stream for stream in streams if stream != current]
    for stream in streams:
        current.wait_stream(stream)
    yield
    for stream in streams:
        stream.wait_stream(current)


def enter_thread(device: torch.device) -> None:
    """For a thread of the project's own that works on a device: it begins on the first one."""
    module_of(device).set_device(device)
    if (runtime := device_runtime()) is not None:
        runtime.spare_captures()


@functools.cache
def _own_stream(device: torch.device) -> Any:
    module, runtime = module_of(device), device_runtime()
    if runtime is not None and hasattr(module, "ExternalStream"):
        with module.device(device):
            made = runtime.new_stream()
        if made is not None:
            return module.ExternalStream(made, device=device)
    return module.Stream(device)
