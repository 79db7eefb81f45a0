"""What is not training yields to it: the CPU priority of stager and flusher."""

from __future__ import annotations

import os

__all__ = ["NICENESS", "yield_to_training"]

NICENESS = 10
"""Against a process of niceness 0 that wants the same core: about a tenth of it. Alone on a core: all of it."""


def yield_to_training() -> None:
    """Have the rest of this process run behind training ranks on the same machine. First thing in its main thread.

    Threads and children that are started later inherit it. On a stager's node of its own it changes nothing
    (docs/design/027-priority.md).
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
