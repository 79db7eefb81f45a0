"""What torch loads by itself in each process that sees the late device: the kernels, and no library but ours."""

from __future__ import annotations

import os
import warnings

__all__ = ["load"]


def load() -> None:
    """Called at the end of `import torch`, by the entry point in the group torch.backends."""
    import torch
    import torch._meta_registrations  # shapes of results, those that Python says

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that kernels are registered a second time: that is what they are for
        torch.ops.load_library(os.environ["LATE_KERNELS"])  # type: ignore[no-untyped-call]
    # They would call libraries of which only the names are there.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
