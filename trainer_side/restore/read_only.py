"""Finds live tensors in memory that cannot be written, such as a file mapped for reading.

torch writes into them without a check (`torch.from_numpy` of a `np.memmap` only warns), and the process would get
SIGSEGV while it restores.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import tensor_paths

_MAPS = Path("/proc/self/maps")


def find_read_only(live: Mapping[str, Any]) -> list[str]:
    """Return the paths of the tensors whose memory cannot be written; empty on systems without such a list."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    begins, ends = [], []
    for line in lines:  # 7f10c000-7f10d000 r--p 00000000 …, ascending
        span, permissions = line.split(" ", 2)[:2]
        if "w" not in permissions:
            begin, end = span.split("-")
            begins.append(int(begin, 16))
            ends.append(int(end, 16))
    found = []
    for path, tensor in tensor_paths(live):
        local = local_of(tensor)
        if local.device.type != "cpu" or local.layout is not torch.strided or not local.numel():
            continue
        place = bisect.bisect_right(begins, address := local.data_ptr()) - 1
        if place >= 0 and address < ends[place]:
            found.append(path)
    return found
