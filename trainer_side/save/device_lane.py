"""The calls to one device that a copy needs, the same for CUDA, ROCm and XPU.

    current stream   the training's: what is queued here at `save()` is of that moment, and updates come after
    own stream       the project's: copies to the host, behind an event, beside the training

The own stream is made by the runtime itself and kept as long as the process. `torch.cuda.Stream()` deals 32 streams to
all who ask, so one of those would be the user's as well. XPU has no other: there it is one of torch's.

Memory for copies comes from torch's allocator, on the own stream: what is freed there serves this stream alone, so it
is neither cut from a block that training has freed a moment ago nor given to training in pieces. A copy finds it again
at the next save, and nothing is mapped. Where the device has no more for training, torch itself gives all of it back
before it gives up, as it does with whatever it keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from trainer_side.save.device_runtime import device_runtime
from trainer_side.state.accelerator import StreamEvent, module_of, record


class DeviceMemory(NamedTuple):
    """The memory of a device, in bytes.

    Attributes:
        free: What nobody holds, as far as torch may take it.
        total: Of the device.
        reserved: What torch holds for tensors of this process, in use or not, and for copies. `peak`: the most so far.
        retries: So many times torch had to give memory back to the device before there was enough.
        returned: Bytes that torch has given back to the device so far, for whatever reason.
    """

    free: int
    total: int
    reserved: int
    peak: int
    retries: int
    returned: int = 0


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

    def on_device(self, nbytes: int) -> torch.Tensor:
        """Memory in the order of the own stream, as bytes. What was queued there before must be done by now, if another
        stream is to touch it.

        Raises:
            OutOfMemoryError: There is none.
        """
        ...

    def fill(self, emptied: Sequence[torch.Tensor]) -> None:
        """As `on_device`, for tensors whose memory was given back by `empty`: they and their views are as before.

        Raises:
            OutOfMemoryError: There is none; those that have some by now keep it.
        """
        ...

    def on_current_stream(self, nbytes: int) -> torch.Tensor:
        """As `on_device`, for the current stream alone."""
        ...

    def span(self, address: int, nbytes: int) -> torch.Tensor | None:
        """Bytes of the device from an address on, whoever has memory there; nothing is kept alive by it.

        Returns:
            None: torch has no such tensors for this kind of device.
        """
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

    def go_on(self) -> None:
        """As `DeviceLane`."""
        self._stream.wait_event(self.record())

    def on_device(self, nbytes: int) -> torch.Tensor:
        """As `DeviceLane`."""
        with self.beside(None), torch.inference_mode(mode=False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def fill(self, emptied: Sequence[torch.Tensor]) -> None:
        """As `DeviceLane`."""
        with self.beside(None):
            refill_all(emptied)

    def on_current_stream(self, nbytes: int) -> torch.Tensor:
        """As `DeviceLane`."""
        with torch.inference_mode(mode=False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def span(self, address: int, nbytes: int) -> torch.Tensor | None:
        """As `DeviceLane`."""
        if self._device.type != "cuda":
            return None
        return torch.as_tensor(_DeviceBytes(address, nbytes), device=self._device)

    def memory(self) -> DeviceMemory | None:
        """As `DeviceLane`."""
        if not hasattr(self._module, "mem_get_info"):
            return None
        try:
            free, total = map(int, self._module.mem_get_info(self._device))
        except RuntimeError:  # some drivers of XPU do not tell
            return None
        stats = self._module.memory_stats(self._device)
        reserved, peak, returned = (
            int(stats.get(f"reserved_bytes.all.{what}", 0)) for what in ("current", "peak", "freed")
        )
        if hasattr(self._module, "get_per_process_memory_fraction"):
            limit = int(total * self._module.get_per_process_memory_fraction(self._device))
            free = max(0, min(free, limit - reserved))
        retries = int(stats.get("num_alloc_retries", 0))
        return DeviceMemory(free, total, reserved, peak, retries, returned)


def empty(memory: torch.Tensor) -> None:
    """Give the memory of a tensor back to torch, of which `on_device` was; views of it stay. Any thread.

    On the own stream it may be taken again at once: what else is still going to touch it must come before that in the
    stream's order (`go_on`).
    """
    memory.untyped_storage().resize_(0)


def refill_all(emptied: Iterable[torch.Tensor]) -> None:
    """Take memory again for tensors that `empty` has emptied, for the current stream.

    Raises:
        OutOfMemoryError: There is none.
    """
    for memory in emptied:
        memory.untyped_storage().resize_(memory.numel())


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
