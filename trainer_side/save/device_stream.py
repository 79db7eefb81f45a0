"""The calls to one device that a copy needs, the same for CUDA, ROCm and XPU.

    current stream   the training's: copies queued at `save()` read the state of that moment, before later updates
    own stream       holdfast's: copies to the host, behind an event, beside the training

The runtime itself makes the own stream, which lives as long as the process. `torch.cuda.Stream()` hands out 32 streams
in turn, so the script might share one of those. XPU offers nothing else: its own stream is one of torch's.

Memory for copies comes from torch's allocator, on the own stream. Blocks freed there serve this stream alone: copies do
not split blocks that training has just freed, and training does not split theirs. The next save reuses the blocks
without mapping memory. When training runs out of memory, torch frees them, like all cached blocks, before it raises.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_side.state.accelerator import StreamEvent, module_of, record_event

_PREFIXES = ("cuda", "hip")
_PORTABLE = 1  # locked for all devices: cudaHostRegisterPortable
_NON_BLOCKING = 1  # no implicit synchronization with the default stream: cudaStreamNonBlocking
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice


# (to address, from address, bytes)
DeviceMove = tuple[int, int, int]


class DeviceRuntime:
    """The runtime library of CUDA or HIP that torch uses. Any thread."""

    def __init__(self, library: Any, prefix: str) -> None:
        self._library, self._prefix = library, prefix

    def lock(self, address: int, nbytes: int) -> int:
        """Lock host memory in place; return the runtime's error code, 0 for none, and clear the error."""
        return self._call("HostRegister", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE)

    def unlock(self, address: int) -> None:
        """Undo `lock`. The device must have finished all reads and writes there."""
        self._call("HostUnregister", ctypes.c_void_p(address))

    def new_stream(self) -> int | None:
        """Make a stream of the lowest priority on the current device; None if the runtime refuses."""
        lowest, highest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        if self._call("DeviceGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest)):
            return None
        if self._call("StreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, lowest):
            return None
        return stream.value

    def relax_capture_mode(self) -> None:
        """Keep calls of this thread from ending the recording of a graph in another thread."""
        self._call("ThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def copy(self, copies: Iterable[DeviceMove], stream: int) -> None:
        """Queue copies within the current device: five times as fast as torch. RuntimeError: one is refused."""
        queue = getattr(self._library, self._prefix + "MemcpyAsync")
        on = ctypes.c_void_p(stream)
        for to, of, nbytes in copies:
            if code := queue(
                ctypes.c_void_p(to), ctypes.c_void_p(of), ctypes.c_size_t(nbytes), _ON_DEVICE, on
            ):
                getattr(self._library, self._prefix + "GetLastError")()
                raise RuntimeError(f"a copy of {nbytes} bytes within the device was refused: error {code}")

    def _call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, self._prefix + name, None)
        if function is None:
            return -1
        code = int(function(*arguments))
        if code:
            # Clear the error, or the next kernel launch of this thread, one of the training, would raise it.
            getattr(self._library, self._prefix + "GetLastError")()
        return code


@functools.cache
def device_runtime() -> DeviceRuntime | None:
    """Return the runtime that torch calls; None if it has none."""
    folder = Path(torch.__file__).parent / "lib"
    for prefix in _PREFIXES:
        try:
            # Names are looked up in this library and those that it is linked to, which are torch's own. Another mapped
            # version of the runtime, from another package, is ignored.
            library = ctypes.CDLL(str(folder / f"libc10_{prefix}.so"), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        if hasattr(library, f"{prefix}GetLastError"):
            return DeviceRuntime(library, prefix)
    return None


class DeviceMemory(NamedTuple):
    free: int  # torch may still allocate these
    total: int
    reserved: int  # by torch's allocator in this process, in use or cached, copies included
    peak: int  # of `reserved`
    retries: int  # of the caching allocator: a count
    returned: int = 0  # by torch to the device so far


class DeviceStream:
    """The calls to one device that a copy needs, and holdfast's own stream on it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._stream = _own_stream(device)

    @contextmanager
    def on_own_stream(self, after: StreamEvent | None) -> Iterator[None]:
        """Queue this thread's work on the own stream inside the block, behind `after`."""
        if after is not None:
            self._stream.wait_event(after)
        with self._module.stream(self._stream):
            yield

    def record_event(self) -> StreamEvent:
        """Record an event on the current stream."""
        return record_event(self._device)

    def wait_for_current_stream(self) -> None:
        """Make later work on the own stream wait for everything queued on the current stream."""
        self._stream.wait_event(self.record_event())

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate memory in the order of the own stream, as bytes. Before another stream touches it, earlier work on
        the own stream must be finished. OutOfMemoryError: the device has too little memory left.
        """
        with self.on_own_stream(None):
            return self.allocate_on_current_stream(nbytes)

    def refill(self, emptied: Sequence[torch.Tensor]) -> None:
        """Reallocate tensors that `free_storage` has emptied, as `allocate`; their views are valid again."""
        with self.on_own_stream(None):
            refill_all(emptied)

    def allocate_on_current_stream(self, nbytes: int) -> torch.Tensor:
        """As `allocate`, for the current stream alone."""
        # Not torch.empty(nbytes): under torch.use_deterministic_algorithms(True) it queues a fill with NaNs on the own
        # stream, which may run after the training's stream has copied the state there.
        with torch.inference_mode(mode=False):
            storage = torch.UntypedStorage(nbytes, device=self._device)  # type: ignore[no-untyped-call]
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def span(self, address: int, nbytes: int) -> torch.Tensor | None:
        """View device memory from an address on as bytes, keeping nothing alive; None: torch cannot on this device."""
        if self._device.type != "cuda":
            return None
        return torch.as_tensor(_DeviceBytes(address, nbytes), device=self._device)

    def copy(self, copies: Sequence[DeviceMove]) -> bool:
        """Queue copies within this device on the current stream. Without a runtime, queue nothing and return False."""
        runtime = device_runtime()
        if runtime is None or self._device.type != "cuda":
            return False
        runtime.copy(copies, self._module.current_stream(self._device).cuda_stream)
        return True

    def memory(self) -> DeviceMemory | None:
        """Measure the device's memory; None if the driver does not report it."""
        if not hasattr(self._module, "mem_get_info"):
            return None
        try:
            free, total = map(int, self._module.mem_get_info(self._device))
        except RuntimeError:  # some drivers of XPU do not report it
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


def free_storage(memory: torch.Tensor) -> None:
    """Return the memory of a tensor made by `allocate` to torch; views of it stay. Any thread.

    The own stream may reuse the memory at once: accesses queued on other streams must come before that
    (`wait_for_current_stream`).
    """
    memory.untyped_storage().resize_(0)


def refill_all(emptied: Iterable[torch.Tensor]) -> None:
    """Reallocate tensors that `free_storage` has emptied, for the current stream. Raises OutOfMemoryError."""
    for memory in emptied:
        memory.untyped_storage().resize_(memory.numel())


class _DeviceBytes:
    """Device memory as `torch.as_tensor` accepts it from other libraries: by CUDA's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        place = (address, False)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": place, "version": 2}


@functools.cache
def stream_of(device: torch.device) -> DeviceStream:
    """Return the one `DeviceStream` of a device. Any thread."""
    return DeviceStream(device)


@contextmanager
def ordered_with_streams(device: torch.device, others: Iterable[Any]) -> Iterator[None]:
    """Order work that is queued on the current stream inside the block after the streams `others`, and before their
    later work: a `save()` on a side stream saves everything that the training's stream has queued.
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


def bind_thread_to_device(device: torch.device) -> None:
    """Select the device in a thread of holdfast's own, which starts on the first one."""
    module_of(device).set_device(device)
    if (runtime := device_runtime()) is not None:
        runtime.relax_capture_mode()


@functools.cache
def _own_stream(device: torch.device) -> Any:
    module, runtime = module_of(device), device_runtime()
    if runtime is not None and hasattr(module, "ExternalStream"):
        with module.device(device):
            made = runtime.new_stream()
        if made is not None:
            return module.ExternalStream(made, device=device)
    return module.Stream(device)
