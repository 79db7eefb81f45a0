"""The trainers' part of `holdfast doctor`: torch, its devices, memory that a device can copy into, and notices."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from operator_side.doctor import Finding, Plan, State
from trainer_side.check import metadata

__all__ = ["devices", "trainer"]

_PINNED_BYTES = 64 << 20


def trainer(plan: Plan) -> Iterator[Finding]:
    """All that a training rank needs of its machine."""
    yield from devices(plan)
    yield from metadata(plan)


def devices(_: Plan) -> Iterator[Finding]:
    """Version of torch, the devices it sees, and whether host memory can be pinned for them."""
    yield Finding("torch", State.OK, f"torch {torch.__version__}")
    if not torch.cuda.is_available():
        wanted = torch.version.cuda is not None
        yield Finding(
            "gpu",
            State.WARN if wanted else State.SKIPPED,
            "torch sees no CUDA device" if wanted else "this torch is built for CPUs",
            "look at nvidia-smi and the driver" if wanted else "",
        )
        return
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(
            f"gpu {index}", State.OK, f"{name}, {free_bytes >> 20:,} of {total_bytes >> 20:,} MiB free"
        )
    try:
        torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        yield Finding(
            "pinned memory", State.FAIL, f"cannot pin {_PINNED_BYTES >> 20} MiB: {error}", "raise ulimit -l"
        )
    else:
        yield Finding("pinned memory", State.OK, f"{_PINNED_BYTES >> 20} MiB pinned")
