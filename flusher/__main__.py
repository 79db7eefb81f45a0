"""`python -m flusher`: the same as `holdfast flusher`, for a stager that starts it with its own Python.

`python -m flusher ahead …` does nothing but load its modules, until it is told to begin by a line on its standard
input, with further options. It ends where that comes to its end first: the stager that has started it is dead, or does
not need it.
"""

import os
import sys

from flusher.command import flusher

if __name__ == "__main__":
    if sys.argv[1:2] == ["ahead"]:
        del sys.argv[1]
        said = sys.stdin.readline()
        if not said:
            sys.exit(0)
        sys.argv += said.split()
        with open(os.devnull) as nothing:  # noqa: PTH123 - as where it is started to begin at once
            os.dup2(nothing.fileno(), sys.stdin.fileno())
    flusher()
