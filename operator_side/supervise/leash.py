"""`python -m operator_side.supervise.leash COMMAND …`: becomes COMMAND, and dies with the process that started it.

A supervisor that is killed must not leave a job behind, which would collide with the next one.
"""

from __future__ import annotations

import os
import signal
import sys

from holdfast.process import tie


def main() -> None:
    parent = int(sys.argv[1])
    tie(signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before this process was tied to it
        os._exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command line is this program's own


if __name__ == "__main__":
    main()
