"""Calls to the runtime under torch (CUDA, or HIP in a torch for ROCm) that torch does not offer, asked for by name.

    lock, unlock          host memory that the device reads and writes without stopping the CPU
    new_stream            a stream that is nobody else's: `torch.cuda.Stream()` deals 32 of them to all who ask
    spare_captures        this thread's calls do not end a graph that another thread records

It is the library that torch itself calls: another one in the same process has other streams, and may have no device.
Without it (torch for CPUs or XPU, or one that has the runtime inside) nothing is locked, and streams are torch's.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

_PREFIXES = ("cuda", "hip")
_PORTABLE = 1  # locked for all devices: cudaHostRegisterPortable
_NON_BLOCKING = 1  # not in step with the default stream: cudaStreamNonBlocking
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class DeviceRuntime:
    """The library. Any thread.

    Args:
        library: It.
        prefix: Of all its names.
    """

    def __init__(self, library: Any, prefix: str) -> None:
        self._library, self._prefix = library, prefix

    def lock(self, address: int, nbytes: int) -> int:
        """Lock host memory in place; returns an error of the runtime, 0 for none. Nothing is left of an error."""
        return self._call("HostRegister", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE)

    def unlock(self, address: int) -> None:
        """Undo `lock`: the device must have come to the end of all that reads or writes there."""
        self._call("HostUnregister", ctypes.c_void_p(address))

    def new_stream(self) -> int | None:
        """A stream of the current device, of the lowest priority that there is; None where the runtime refuses."""
        lowest, highest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        if self._call("DeviceGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest)):
            return None
        if self._call("StreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, lowest):
            return None
        return stream.value

    def spare_captures(self) -> None:
        """From now on calls of this thread do not end the recording of a graph in another thread."""
        self._call("ThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def _call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, self._prefix + name, None)
        if function is None:
            return -1
        code = int(function(*arguments))
        if code:
            # Else the next kernel that this thread launches, one of the training, would raise it.
            getattr(self._library, self._prefix + "GetLastError")()
        return code


@functools.cache
def device_runtime() -> DeviceRuntime | None:
    """The runtime that torch calls; None where it has none."""
    folder = Path(torch.__file__).parent / "lib"
    for prefix in _PREFIXES:
        try:
            # A name is looked for in this library and then in those that it was linked to, which are torch's own; what
            # else is mapped (another version of the runtime, brought by another package) is passed over.
            library = ctypes.CDLL(str(folder / f"libc10_{prefix}.so"), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        if hasattr(library, f"{prefix}GetLastError"):
            return DeviceRuntime(library, prefix)
    return None
