"""Control of the late runtime from inside the process that runs on it: policies, faults, counts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Copied", "LateMachine", "is_late"]

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
ILLEGAL_ADDRESS = 700  # cudaErrorIllegalAddress


def is_late() -> bool:
    """Whether this process runs on the late runtime."""
    return "LATE_KERNELS" in os.environ


class Copied(NamedTuple):
    """Bytes copied on one stream."""

    to_device: int
    to_host: int
    on_device: int


class LateMachine:
    """The runtime of this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcudart.so.13")
        for name in ("count", "pending", "copied_bytes", "pinned_bytes", "device_bytes"):
            getattr(self._library, f"late_{name}").restype = ctypes.c_uint64
        self._library.late_copied_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._library.late_violations.restype = ctypes.c_char_p
        self._library.late_fail.argtypes = [
            ctypes.c_char_p,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
        ]

    def policy(self, name: str) -> None:
        """Set when queued work is done: `side_lazy`, `lazy`, `eager` or `dice:SEED`."""
        assert self._library.late_policy(name.encode()) == 0, f"no policy is called {name}"

    def fail(
        self, call: str, *, after: int = 0, times: int = 1, error: int = OUT_OF_MEMORY, lasting: bool = False
    ) -> None:
        """Make `times` calls of this name fail, after `after` calls that succeed; "any" means each call. After a
        lasting error every call fails with it, as after an illegal access.
        """
        self._library.late_fail(call.encode(), after, times, error, int(lasting))

    def heal(self) -> None:
        """Remove all faults, and clear the error that one has left."""
        self._library.late_heal()

    def count(self, what: str, *, of_this_thread: bool = False) -> int:
        """How often a call of the runtime was made, by its name; or `host_waits`, `spinning_waits` (for an event
        without blocking synchronization), `pageable_copies`, `mapped_bytes` (memory that a device had to map, which
        waits for all queued work of that device), `locked_bytes` (host memory that was locked).
        """
        return int(self._library.late_count(what.encode(), int(of_this_thread)))

    def host_waits(self) -> int:
        """Calls of this thread that wait for a device."""
        return self.count("host_waits", of_this_thread=True)

    def pending(self) -> int:
        """Number of queued operations that are not done."""
        return int(self._library.late_pending())

    def copied(self, stream: int) -> Copied:
        """Bytes copied on a stream so far; `stream`: its `cuda_stream`, 0 for the default one."""
        return Copied(*(int(self._library.late_copied_bytes(stream, kind)) for kind in (1, 2, 3)))

    def pinned_bytes(self) -> int:
        """Host memory that is allocated or registered with CUDA."""
        return int(self._library.late_pinned_bytes())

    def device_bytes(self, device: int = 0) -> int:
        """Memory of a device that is allocated, by torch's allocator or any other code."""
        return int(self._library.late_device_bytes(device))

    def violations(self) -> list[str]:
        """Rules that were broken since the last call, although no CUDA call failed for it."""
        return str(self._library.late_violations().decode()).splitlines()

    @contextmanager
    def no_mapping(self) -> Iterator[None]:
        """Check that no device maps memory in this block, for any thread."""
        before = self.count("mapped_bytes")
        yield
        assert self.count("mapped_bytes") == before

    @contextmanager
    def no_host_waits(self) -> Iterator[None]:
        """Check that this thread does not wait for a device in this block."""
        before = self.host_waits()
        yield
        assert self.host_waits() == before, f"{self.host_waits() - before} waits for the device"
