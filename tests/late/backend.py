"""The plugin that torch loads in each process that sees the late device: the kernels, and our libraries only."""

from __future__ import annotations

import os
import warnings

__all__ = ["load"]


def load() -> None:
    """Load the kernels; `import torch` calls this at its end, by the entry point in the group torch.backends."""
    import torch
    import torch._meta_registrations  # shapes of results, for ops whose shapes Python defines

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels registered a second time, which is intended
        torch.ops.load_library(os.environ["LATE_KERNELS"])  # type: ignore[no-untyped-call]
    # These would call libraries that are only stand-ins.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
