"""`python -m operator_side.supervise.leash COMMAND …`: becomes COMMAND, and dies with the process that started it.

A supervisor that is killed must not leave a job that nobody watches: the next one would meet it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie(number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent dies. Kept across exec, not fork."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def main() -> None:
    """Tie this process to its parent and become the command."""
    parent = int(sys.argv[1])
    tie(signal.SIGTERM)
    if os.getppid() != parent:  # it died before we were tied
        os._exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - that is what this file is for


if __name__ == "__main__":
    main()
