"""Host memory that a device copies into: staging areas and slots of tiers, locked in place.

An area is mapped and touched (tiers/first_touch.py), and then locked. torch's own pinned memory is not used: torch
rounds it up to a power of two, and never returns it to the system.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch

from holdfast.store.file_system import file_system_of
from trainer_side.save.device_stream import DeviceRuntime, bind_thread_to_device, device_runtime
from trainer_side.state.accelerator import module_of, own_device
from trainer_side.tiers.first_touch import huge_buffer

_log = logging.getLogger("holdfast.trainer")

_INVALID_VALUE = 1
# Error codes of CUDA and HIP, which use the same numbers.
_CAUSES = {
    -1: "this runtime has no call for it; install the CUDA or ROCm build of torch",
    _INVALID_VALUE: "the driver does not take these pages; only ordinary memory and files on a tmpfs can be locked",
    2: "no more memory may be locked; raise the limit of locked memory (ulimit -l), or free memory of the host",
    304: "the operating system refused; raise the limit of locked memory (ulimit -l), and see dmesg",
    712: "another library has locked a part of it already; see which one locks memory that it does not own",
    801: "this device or driver cannot lock memory in place, as under some virtual machines",
}


def locked_buffer(nbytes: int) -> torch.Tensor:
    """Return a `huge_buffer` locked for the device of this rank; freed with the last tensor over it. A forked child
    does not get it: the kernel would copy all of it there, as it does with pages that a device uses.
    """
    memory = huge_buffer(nbytes, exclude_from_fork=True)
    _lock(memory, "host memory for checkpoints")
    return memory


def slot_tensor(slot: memoryview, *, pinned: bool) -> torch.Tensor:
    """Return a tensor over writable memory, which keeps its content, and stays mapped as long as the tensor lives.

    `pinned`: Lock it for the device. If that is refused, copies from the device still work, but block the CPU.
    """
    memory = torch.frombuffer(slot, dtype=torch.uint8)
    if pinned:
        _lock(memory, "a local tier")
    return memory


def _lock(memory: torch.Tensor, what: str) -> None:
    if (problem := lock(memory)) is not None:
        _log.warning(
            "the device's runtime cannot lock %d bytes of %s: %s. Copies from the device into them are slow and block "
            "the CPU",
            memory.numel(),
            what,
            problem,
        )


def lock(memory: torch.Tensor) -> str | None:
    """Lock memory in place for the device of this rank, until the tensor is gone; return why that was refused, and what
    to do. None: it is locked, or torch has no runtime that locks.
    """
    runtime, device = device_runtime(), own_device()
    if runtime is None:
        return None
    address, nbytes = memory.data_ptr(), memory.numel()
    # Otherwise the call would create a context on the first device.
    with contextlib.nullcontext() if device is None else module_of(device).device(device):
        code = runtime.lock(address, nbytes)
    if code:
        return _refusal(code, address)
    weakref.finalize(memory, _unlock, runtime, address, os.getpid()).atexit = False
    return None


def _unlock(runtime: DeviceRuntime, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the tensor, and no device
        runtime.unlock(address)


def _refusal(code: int, address: int) -> str:
    if code == _INVALID_VALUE and (file := _file_at(address)) is not None:
        return (
            f"error {code}: it is the mapped file {file} on {file_system_of(file)}, and only files in memory can be "
            "locked; put it on a tmpfs"
        )
    return f"error {code}: {_CAUSES.get(code, 'look this number up among the errors of the runtime')}"


def _file_at(address: int) -> Path | None:
    """The file that is mapped at this address; None for memory without one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, _, _, inode, *path = line.split(maxsplit=5)
            begin, end = (int(word, 16) for word in span.split("-"))
            if begin <= address < end:
                return Path(path[0]) if path and inode != "0" and path[0].startswith("/") else None
    return None


Make = Callable[[], torch.Tensor | None]  # None: the taker makes it itself


class MemoryPreallocator:
    """Makes memory in a thread, ahead of its use. Training thread.

    `makes`: For each key, in the order of use, a function that makes its memory; called in any thread.
    """

    def __init__(self, makes: Mapping[int, Make]) -> None:
        self._lock = threading.Lock()
        self._pending = dict(makes)
        self._begun: dict[int, Future[torch.Tensor | None]] = {}
        self._thread: threading.Thread | None = None
        if makes:
            self._thread = threading.Thread(target=self._run, name="holdfast-memory", daemon=True)
            self._thread.start()

    def claim(self, key: int) -> torch.Tensor | None:
        """Hand out the memory of this key, once; wait if the thread is making it, and raise its error.

        None: there is no such key, or it could not be made ahead.
        """
        with self._lock:
            make, begun = self._pending.pop(key, None), self._begun.pop(key, None)
        if make is not None:
            return make()
        return None if begun is None else begun.result()

    def stop(self) -> None:
        """Make nothing more, and free memory that was not taken."""
        with self._lock:
            self._pending.clear()
            self._begun.clear()

    def close(self, seconds_max: float) -> None:
        """`stop`, and wait at most `seconds_max` for the memory being made."""
        self.stop()
        if self._thread is not None:
            self._thread.join(seconds_max)

    def _run(self) -> None:
        if (device := own_device()) is not None:
            bind_thread_to_device(device)  # also keeps a lock from ending a graph capture of the training
        while (made := self._next()) is not None:
            make, future = made
            try:
                future.set_result(make())
            except BaseException as error:  # noqa: BLE001 - raised by `claim`
                future.set_exception(error)
            del made, make, future  # a waiting thread must not keep the memory alive

    def _next(self) -> tuple[Make, Future[torch.Tensor | None]] | None:
        with self._lock:
            if not self._pending:
                return None
            key = next(iter(self._pending))
            self._begun[key] = Future()
            return self._pending.pop(key), self._begun[key]
