"""The job that `holdfast doctor` starts: `mpirun -n 2 python -m stager.doctor_job measure|survive ANSWER`.

measure: rank 0 sends to rank 1 and writes the bandwidth. survive: rank 1 kills itself, rank 0 writes how soon it
noticed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import mpi4py
import numpy as np

mpi4py.rc.finalize = False  # it may wait for the dead rank
from mpi4py import MPI  # noqa: E402

_MESSAGE_BYTES = 16 << 20
_MESSAGES = 32
_NOTICE_SECONDS_MAX = 20.0
_PAUSE_SECONDS = 1e-3


def main(mode: str, answer: Path) -> None:
    """Run as one of two ranks; rank 0 writes the answer."""
    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    if comm.size != 2:
        sys.exit(f"expected 2 ranks, got {comm.size}")
    result = _measure(comm) if mode == "measure" else _survive(comm)
    if result is not None:
        partial = answer.with_suffix(".new")
        partial.write_text(json.dumps(result))
        partial.rename(answer)
    if mode == "measure":
        MPI.Finalize()
    else:
        os._exit(0)  # the other rank is dead, and MPI_Finalize might wait for it


def _measure(comm: MPI.Intracomm) -> dict[str, object] | None:
    buffer = np.ones(_MESSAGE_BYTES, np.uint8)
    seconds = 0.0
    for messages in (2, _MESSAGES):  # the first round only warms up
        comm.Barrier()
        began = time.perf_counter()
        for _ in range(messages):
            if comm.rank == 0:
                comm.Send([buffer, MPI.BYTE], 1)
            else:
                comm.Recv([buffer, MPI.BYTE], 0)
        comm.Barrier()
        seconds = time.perf_counter() - began
    hosts = comm.gather(MPI.Get_processor_name())
    if comm.rank != 0:
        return None
    return {
        "library": MPI.Get_library_version().split(",")[0].strip(),
        "mpi4py": mpi4py.__version__,
        "hosts": hosts,
        "bytes_per_second": _MESSAGES * _MESSAGE_BYTES / seconds,
    }


def _survive(comm: MPI.Intracomm) -> dict[str, object] | None:
    buffer = np.zeros(1)
    if comm.rank == 1:
        buffer[0] = time.time()
        comm.Send(buffer, 0)
        comm.Recv(buffer, 0)  # rank 0 has posted its receive
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Recv(buffer, 1)
    request = comm.Irecv(np.zeros(1), 1)
    comm.Send(buffer, 1)
    began = time.monotonic()
    while time.monotonic() - began < _NOTICE_SECONDS_MAX:
        try:
            request.Test()
        except MPI.Exception:
            return {"noticed_seconds": time.monotonic() - began}
        time.sleep(_PAUSE_SECONDS)
    return None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
