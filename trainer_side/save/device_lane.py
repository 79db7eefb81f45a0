"""The calls to one device that a copy needs, the same for CUDA, ROCm and XPU.

    current stream   the training's: what is queued here at `save()` is of that moment, and updates come after
    own stream       the project's: copies to the host, behind an event, beside the training

The own stream is made by the runtime itself and kept as long as the process. `torch.cuda.Stream()` deals 32 streams to
all who ask, so one of those would be the user's as well. XPU has no other: there it is one of torch's.

Memory is taken from the device itself, in the order of the own stream. torch's allocator would cut a block that
training has freed a moment ago and wants again in one piece, and would keep the memory afterwards.
"""

from __future__ import annotations

import functools
import weakref
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
        free: What nobody holds. What torch keeps for training is not among it.
        total: Of the device.
        reserved: What torch holds for tensors of this process, in use or not. `peak`: the most so far.
        retries: So many times torch had to give memory back to the device before there was enough.
    """

    free: int
    total: int
    reserved: int
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

    def go_on(self) -> None:
        """What is queued on the own stream from now on comes behind all that is queued on the current one."""
        ...

    def drain(self) -> None:
        """Wait for the own stream: what it gave back belongs to the device again."""
        ...

    def on_device(self, nbytes: int) -> torch.Tensor:
        """Memory for the own stream, and for the current one from this point on.

        It is given back in the order of the own stream, as soon as no tensor is over it: what else is still going to
        touch it by then must be in that order, too (`go_on`).

        Raises:
            OutOfMemoryError: There is none.
        """
        ...

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device can copy into without stopping the CPU."""
        ...

    def memory(self) -> DeviceMemory | None:
        """None: it cannot be measured, or none can be taken beside torch."""
        ...


class AcceleratorLane:
    """The lane of one device.

    Args:
        device: It.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._stream = _own_stream(device)
        runtime, stream = device_runtime(), getattr(self._stream, "cuda_stream", None)
        # What takes memory beside torch, and in the order of which stream. XPU has no such call.
        self._beside_torch = None if runtime is None or stream is None else (runtime, int(stream))

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

    def go_on(self) -> None:
        """As `DeviceLane`."""
        self._stream.wait_event(self.record())

    def drain(self) -> None:
        """As `DeviceLane`."""
        with self.beside(None):
            self.record().synchronize()

    def on_device(self, nbytes: int) -> torch.Tensor:
        """As `DeviceLane`."""
        if self._beside_torch is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            memory.record_stream(self._stream)
            return memory
        runtime, stream = self._beside_torch
        address = runtime.allocate(nbytes, stream)
        if address is None:
            raise torch.OutOfMemoryError(f"{self._device} has no {nbytes} bytes beside what torch holds")
        taken = _DeviceBytes(address, nbytes)
        weakref.finalize(taken, runtime.free, address, stream).atexit = False
        with self.beside(None):
            there = self.record()
        self._module.current_stream(self._device).wait_event(there)
        return torch.as_tensor(taken, device=self._device)

    def on_host(self, nbytes: int) -> torch.Tensor:
        """As `DeviceLane`."""
        return locked_buffer(max(1, nbytes))

    def memory(self) -> DeviceMemory | None:
        """As `DeviceLane`."""
        if self._beside_torch is None or not hasattr(self._module, "mem_get_info"):
            return None
        free, total = self._module.mem_get_info(self._device)
        stats = self._module.memory_stats(self._device)
        reserved, peak = (int(stats.get(f"reserved_bytes.all.{when}", 0)) for when in ("current", "peak"))
        return DeviceMemory(int(free), int(total), reserved, peak, int(stats.get("num_alloc_retries", 0)))


class _DeviceBytes:
    """Memory of a device as torch takes it over from others, by CUDA's array interface; kept by each tensor over it."""

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
