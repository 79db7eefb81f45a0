"""The MPI job of a training rank: the exchange of roles at start-up, and the end of MPI.

The first import starts MPI. `MpiWorld` makes communicators of our own.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from typing import ClassVar

import mpi4py
import numpy as np

from holdfast.config import OWN_STAGER, TrainerConfig
from holdfast.errors import ConfigError
from holdfast.image.shares import WRITERS_MAX
from holdfast.net.handshake import INCARNATION_BYTES, JobStart
from holdfast.process import FINALIZE_SECONDS_MAX, at_exit, call_or_exit
from holdfast.wire.frames import Role
from trainer_side.ranks.mpi import MPI, wait
from trainer_side.ranks.mpi_peers import MpiPeers
from trainer_side.ranks.mpi_ports import MpiCouncilPort, MpiStagerPort
from trainer_side.ranks.ports import StagerPort
from trainer_side.ranks.world import World

_END_PAUSE_SECONDS = 5e-3
_FAILED_SECONDS = 3.0  # how long a failed rank waits for the others to end as well
_REVOKE_POLLS = 40


def _finalize() -> None:
    is_running = MPI.Is_initialized() and not MPI.Is_finalized()
    if mpi4py.rc.finalize is not False or not is_running or MpiStagerPort.any_timed_out:
        return
    # After an uncaught exception the others may wait for this rank in a collective call of the script. To wait for them
    # without a deadline would hang the job; the end of this rank is noticed.
    failed = hasattr(sys, "last_value")
    if failed and not MpiWorld.has_joined:
        return  # the ranks have not met yet
    deadline = time.monotonic() + _FAILED_SECONDS if failed else math.inf
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        # An agreement, not a check for dead ranks: a rank that dies while others are in MPI_Finalize would block them.
        # Iagree gives all ranks the same answer, or the same error if one is gone.
        agreement = world.Iagree(np.ones(1, np.int32))
        while not agreement.Test():  # no deadline while the others work: MPI_Finalize has none either
            if world.Is_revoked():
                return
            if time.monotonic() > deadline:
                world.Revoke()  # ULFM does not report a process that exits normally; the others notice this instead
                for _ in range(_REVOKE_POLLS):
                    agreement.Test()
                    time.sleep(_END_PAUSE_SECONDS)
                return
            time.sleep(_END_PAUSE_SECONDS)
    except MPI.Exception:
        return
    except NotImplementedError:  # an MPI without fault tolerance: mpirun ends the job when a process dies
        if failed:
            return
    code = getattr(sys.last_value, "exit_code", 1) if failed else 0
    call_or_exit(FINALIZE_SECONDS_MAX, ctypes.CDLL(MPI.__file__).MPI_Finalize, "MPI_Finalize", code=code)


at_exit(_finalize)  # first registered, last called


class MpiWorld(World):
    """The `World` of an MPI job. Construction is collective. Main thread.

    PeerLost: not all processes joined within `start_seconds_max`. ConfigError: too many stagers, MPI without threads,
    or both an own stager and one of mpirun.
    """

    stager_advice = (
        "add `: -n 1 holdfast stager --store URL` to the mpirun line, or set HOLDFAST_STAGER=own and "
        "HOLDFAST_STORE=URL, and rank 0 starts one"
    )

    has_joined: ClassVar[bool] = False

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(config)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                "MPI was started without support for threads; import trainer_side before mpi4py.MPI, or set "
                "mpi4py.rc.thread_level = 'multiple'"
            )
        world = MPI.COMM_WORLD
        world.Set_errhandler(MPI.ERRORS_RETURN)
        mine = np.array([Role.TRAINER], dtype=np.int32)
        roles = np.zeros(world.size, dtype=np.int32)
        request = world.Iallgather(mine, roles)
        wait([request], config.start_seconds_max, "all processes of the MPI job to join holdfast")
        stagers: list[int] = np.flatnonzero(roles == Role.STAGER).tolist()
        if len(stagers) > WRITERS_MAX:
            raise ConfigError(
                f"{len(stagers)} stagers in one MPI job, expected at most {WRITERS_MAX}; start fewer"
            )
        # In the same order on every process: each stager takes part in both.
        control = world.Dup()
        self._trainers = world.Split(Role.TRAINER, world.rank)
        self._council, self._uncaught = self._trainers.Dup(), self._trainers.Dup()
        for comm in (control, self._trainers, self._council, self._uncaught):
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.ranks = self._trainers.rank, self._trainers.size
        # By their shares, which are in the order of the stagers' world ranks.
        self._ports.update(enumerate(MpiStagerPort(control, rank) for rank in stagers))
        node = self._trainers.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = node.rank
        self.one_machine = bool(node.size == self.ranks)
        node.Free()
        MpiWorld.has_joined = True
        at_exit(self._disconnect)
        if stagers and config.stager == OWN_STAGER:
            raise ConfigError(
                "trainer setting stager: own, and the mpirun line has a stager as well; unset it (HOLDFAST_STAGER), or "
                "take the stager out of the mpirun line"
            )
        self.stagers = len(stagers) or self.stagers

    @property
    def reconnect(self) -> Callable[[int], StagerPort] | None:
        """As `World.reconnect`: only a stager that rank 0 has started can be restarted; mpirun restarts no process."""
        return super().reconnect if self._own else None

    def peers(self) -> MpiPeers:
        return MpiPeers(self._trainers)

    def council_port(self) -> MpiCouncilPort:
        return MpiCouncilPort(self._council)

    def uncaught_port(self) -> MpiCouncilPort:
        return MpiCouncilPort(self._uncaught)

    def _start(self, generation: int) -> JobStart:
        own = os.urandom(INCARNATION_BYTES) if self.rank == 0 else None
        incarnation = self.peers().broadcast(own)
        return JobStart(incarnation.hex(), incarnation, generation)
