"""Host memory of staging areas: touched once, and locked where a device copies into it.

It is mapped and then locked in place. torch's own pinned memory is rounded up to a power of two, up to twice of what is
asked for, and is never given back to the system.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref

import torch

from trainer_side.save.device_runtime import device_runtime
from trainer_side.state.accelerator import module_of, own_device

_log = logging.getLogger("holdfast.trainer")


def huge_buffer(nbytes: int) -> torch.Tensor:
    """`nbytes` (above 0) of zeroed memory as a one-dimensional uint8 tensor; all of it has been touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: pages are small, and all else is the same
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    return buffer.zero_()


def locked_buffer(nbytes: int) -> torch.Tensor:
    """As `huge_buffer`, locked for the device of this rank; given back when the last tensor over it is gone."""
    memory = huge_buffer(nbytes)
    _lock(memory, "host memory for checkpoints")
    return memory


def in_slot(slot: memoryview, *, pinned: bool) -> torch.Tensor:
    """A tensor over `slot`; what is there stays there.

    Args:
        slot: Writable memory that stays mapped as long as the tensor lives.
        pinned: Lock it for the device. Where that is refused, copies from the device still work, and hold up the CPU.
    """
    memory = torch.frombuffer(slot, dtype=torch.uint8)
    if pinned:
        _lock(memory, "a local tier")
    return memory


def _lock(memory: torch.Tensor, what: str) -> None:
    runtime, device = device_runtime(), own_device()
    if runtime is None:
        return
    address, nbytes = memory.data_ptr(), memory.numel()
    # Else it would make a context on the first device.
    with contextlib.nullcontext() if device is None else module_of(device).device(device):
        code = runtime.lock(address, nbytes)
    if code:
        _log.warning(
            "CUDA cannot register %d bytes of %s (error %d): copies from the device into them block the CPU; raise "
            "the limit of locked memory (ulimit -l)",
            nbytes,
            what,
            code,
        )
        return
    weakref.finalize(memory, runtime.unlock, address).atexit = False
