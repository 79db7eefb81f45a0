"""Rank 0 exits like a holdfast process; the others agree to end MPI but never do, as if killed in MPI_Finalize.

`python last_call.py trainer_side.ranks.mpi_world|stager.mpi DIRECTORY`
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

_SECONDS_MAX = 60.0


def main() -> None:
    module, directory = sys.argv[1], Path(sys.argv[2])
    mpi: Any = importlib.import_module(module)
    mpi.FINALIZE_SECONDS_MAX = 0.5
    world, pid = mpi.MPI.COMM_WORLD, os.getpid()
    leaver = world.bcast(pid)
    if leaver == pid:
        return  # and now its last call
    import numpy as np

    everyone = world.Iagree(np.ones(1, np.int32))
    deadline = time.monotonic() + _SECONDS_MAX
    while psutil.pid_exists(leaver) and time.monotonic() < deadline:
        everyone.Test()
        time.sleep(0.01)
    (directory / "saw-it-leave").write_text(str(not psutil.pid_exists(leaver)))
    os._exit(0)


if __name__ == "__main__":
    main()
