"""The last call of a process: bounded, for what it waits for may be dead.

MPI_Finalize meets all processes of the job. One that is killed while the others are in it keeps them there, now and
then for ever, and mpirun with them: nothing is at stake any more, and a machine would be paid for until somebody looks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

__all__ = ["FINALIZE_SECONDS_MAX", "end_within"]

FINALIZE_SECONDS_MAX = 30.0  # it takes milliseconds, and some seconds where many processes share few cores


def end_within(seconds_max: float, call: Callable[[], object], what: str) -> None:
    """Call `call`; if it has not returned after `seconds_max`, say so on stderr and end the process with code 0.

    Main thread, at exit. `what`: names the call. It has to release the GIL while it waits, or no thread can end it:
    mpi4py's `MPI.Finalize` keeps it, the same function called by ctypes does not.
    """

    def leave() -> None:
        sys.stderr.write(
            f"holdfast: {what} did not return within {seconds_max:g} s: a process of this job must have died in it; "
            "nothing is lost, this one leaves\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    timer = threading.Timer(seconds_max, leave)
    timer.daemon = True
    timer.start()
    try:
        call()
    finally:
        timer.cancel()
