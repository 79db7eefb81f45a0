"""Memory of a local tier as a tensor that copies go straight into; registered with CUDA, so that a device writes it.

slot of a tier (mmap: /dev/shm, DAX) ─► tensor over the same bytes ─► cudaHostRegister ─► asynchronous copies
"""

from __future__ import annotations

import logging
import weakref

import torch

__all__ = ["in_slot"]

_log = logging.getLogger("holdfast.trainer")


def in_slot(slot: memoryview, *, pinned: bool) -> torch.Tensor:
    """A tensor over `slot`; what is there stays there.

    Args:
        slot: Writable memory that stays mapped as long as the tensor lives.
        pinned: Register it with CUDA. Where that is refused, copies from the device still work, and hold up the CPU.
    """
    memory = torch.frombuffer(slot, dtype=torch.uint8)
    if pinned:
        _register(memory)
    return memory


def _register(memory: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, nbytes = memory.data_ptr(), memory.numel()
    code = int(runtime.cudaHostRegister(address, nbytes, 0))
    if code:
        _log.warning(
            "CUDA does not register %d bytes of a local tier (error %d): copies from the device into it hold up the "
            "CPU; is the limit of locked memory (ulimit -l) too low?",
            nbytes,
            code,
        )
        return
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
