"""`python -m flusher`: the same as `holdfast flusher`, for a stager that starts it with its own Python.

`python -m flusher ahead …` loads its modules, then waits for a line on standard input with further options before it
starts. It exits if standard input ends first: the stager that started it has died, or does not need it.
"""

import os
import sys

from flusher.command import flusher

if __name__ == "__main__":
    if sys.argv[1:2] == ["ahead"]:
        del sys.argv[1]
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        sys.argv += line.split()
        with open(os.devnull) as nothing:  # noqa: PTH123 - stdin as in a flusher without `ahead`
            os.dup2(nothing.fileno(), sys.stdin.fileno())
    flusher()
