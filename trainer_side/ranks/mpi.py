"""MPI in a training rank, for the three files that call it: initialization settings, waiting, errors.

Importing any of them starts MPI. Rules: errors are returned, never abort (ERRORS_RETURN on each communicator); requests
are polled with a growing pause, because MPI's blocking calls spin; every wait has a deadline.
"""

from __future__ import annotations

import time

import mpi4py

from holdfast.errors import PeerLost
from trainer_side.ranks.peers import poll_until

# The link's thread talks to MPI while the main thread may do so too (restore, or the user's own communicators).
mpi4py.rc.thread_level = "multiple"
# MPI_Finalize sometimes waits for dead processes forever: mpi_world.py decides at exit whether to call it.
mpi4py.rc.finalize = False
from mpi4py import MPI as MPI  # noqa: E402, PLC0414 - re-exported for the other files

PAUSE_SECONDS = 50e-6
LOST = frozenset({MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED})


def wait(requests: list[MPI.Request], seconds_max: float, what: str) -> None:
    """Poll until all are complete. Raises `PeerLost` at the deadline or when a process is dead."""
    try:
        in_time = poll_until(lambda: MPI.Request.Testall(requests), time.monotonic() + seconds_max)
    except MPI.Exception as error:
        raise lost_peer(error, f"a process was lost while waiting for {what}") from error
    if not in_time:
        raise PeerLost(
            f"waited {seconds_max:g} s for {what}; a process of the job is stopped, slow, or does not take part"
        )


def lost_peer(error: MPI.Exception, who: str = "the stager") -> PeerLost:
    if error.Get_error_class() in LOST:
        return PeerLost(f"{who}: its process is dead (MPI: {error.Get_error_string()})")
    return PeerLost(f"{who}: MPI failed: {error.Get_error_string()}")
