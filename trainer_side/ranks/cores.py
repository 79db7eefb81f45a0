"""The cores of the machine that are this rank's share."""

from __future__ import annotations

import os

_RANKS_BESIDE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE")  # by mpirun, by torchrun


def cores_of_rank() -> int:
    """How many cores this rank may keep busy for a moment, at least 1: those it is bound to, or its share of all."""
    usable = len(os.sched_getaffinity(0))
    if usable < (os.cpu_count() or 1):
        return usable  # the launcher has dealt them out
    beside = max((int(os.environ.get(name) or "1") for name in _RANKS_BESIDE), default=1)
    return max(1, usable // max(1, beside))
