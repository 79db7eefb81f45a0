"""Device memory: a save leaves none in use, and a training that takes all of it can still save."""

from __future__ import annotations

import torch

from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.shared import Shared, beside_torch

__all__ = ["measure"]

_SAVES = 3
_LEFT_BYTES = 2 << 20  # one block of torch's allocator


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    windows = shared.windows()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    mirror_bytes = 0
    for _ in range(_SAVES):
        windows.save()
        # A save may have freed a part of its mirror by now, so this is a lower bound.
        mirror_bytes = max(mirror_bytes, torch.cuda.memory_allocated() - before)
        windows.saver.wait_done()
    measured.put(
        state_bytes=windows.training.state_bytes,
        allocated_before_bytes=before,
        mirror_bytes=mirror_bytes,
        peak_of_saves_bytes=torch.cuda.max_memory_allocated() - before,
        kept_bytes=torch.cuda.memory_allocated() - before,
        kept_beside_torch_bytes=beside_torch() - shared.beside_before,
    )
    # The training may take all free memory, and the blocks that torch keeps unused.
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
    full = windows.save()  # must not raise, whether accepted or declined
    windows.saver.wait_done()
    measured.put(full_save_taken=full)
    del taken
    torch.cuda.empty_cache()
    again = windows.save()
    windows.saver.wait_done()
    windows.training.step()
    torch.cuda.synchronize()
    measured.put(saved_again=again, kept_at_the_end_bytes=torch.cuda.memory_allocated() - before)
