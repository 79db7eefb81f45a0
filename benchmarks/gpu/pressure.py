"""Memory of the device: none is in use after a save, and a training that takes all of it gets it and goes on saving."""

from __future__ import annotations

import shutil

import torch

from benchmarks.gpu.device_training import DeviceTraining, saved_by
from benchmarks.gpu.measured import Measured, Sizes

__all__ = ["measure"]

_SAVES = 3
_LEFT_BYTES = 2 << 20  # one block of torch's allocator


def measure(measured: Measured, sizes: Sizes) -> None:
    training = DeviceTraining(sizes, shutil.disk_usage(measured.folder).free)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with saved_by("default", training, measured.folder) as saver:
        beside_before = _beside_torch()
        torch.cuda.reset_peak_memory_stats()
        mirror_bytes = 0
        for number in range(_SAVES):
            saver.save(number)
            # A save may have given back a part of its mirror by now, so this is a lower bound.
            mirror_bytes = max(mirror_bytes, torch.cuda.memory_allocated() - before)
            saver.wait_done()
        measured.put(
            state_bytes=training.state_bytes,
            allocated_before_bytes=before,
            mirror_bytes=mirror_bytes,
            peak_of_saves_bytes=torch.cuda.max_memory_allocated() - before,
            kept_bytes=torch.cuda.memory_allocated() - before,
            kept_beside_torch_bytes=_beside_torch() - beside_before,
        )
        # The training may ask for all memory that is free, and for the blocks that torch keeps unused.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        wanted = free - _LEFT_BYTES
        while True:
            try:
                taken = torch.empty(wanted, dtype=torch.uint8, device="cuda")
                break
            except torch.OutOfMemoryError:
                wanted -= max(_LEFT_BYTES, free // 100)  # the driver has pages of its own
        measured.put(free_bytes=free, asked_and_given_bytes=wanted)
        full = saver.save(_SAVES)  # must not raise, whether it is taken or declined
        saver.wait_done()
        measured.put(full_save_taken=full, causes=dict(saver.checkpointer.stats.causes))
        del taken
        torch.cuda.empty_cache()
        again = saver.save(_SAVES + 1)
        saver.wait_done()
        training.step()
        torch.cuda.synchronize()
        measured.put(saved_again=again, kept_at_the_end_bytes=torch.cuda.memory_allocated() - before)


def _beside_torch() -> int:
    """Bytes of the device that are taken, and are not torch's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
