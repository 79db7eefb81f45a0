"""The CPU priority of stager and flusher beside training on the same machine."""

from __future__ import annotations

import os

__all__ = ["yield_to_training"]


def yield_to_training(niceness: int) -> None:
    """Have this process run at `niceness`, or as nice as it is already. Main thread, before there are others.

    Threads and children that are started later inherit it (docs/design/028-priority.md).

    Args:
        niceness: 0 to 19; 0 changes nothing.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
