"""`torch.distributed` from the MPI job: its variables, without a launcher of its own.

    MPI trainers 0 … R-1 ─► RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT ─► init_process_group

The stager is a process of the MPI job and no rank of `torch.distributed`, so what mpirun itself sets would be wrong.
What another launcher sets is wrong as well: its processes are strangers to each other for MPI.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Literal

import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from trainer_side.ranks.uncaught import end_by_exit_codes

if TYPE_CHECKING:
    from trainer_side.ranks.mpi_world import MpiWorld


def init_torch_distributed(backend: Literal["gloo", "nccl"] | None = None) -> tuple[int, int]:
    """Set up `torch.distributed` among the trainers of this MPI job, with or without a stager in it. Collective.

    Args:
        backend: `gloo` or `nccl`; None takes `nccl` if every rank can have a GPU of its own.

    Returns:
        This rank and the number of ranks.

    Raises:
        PeerLost: A process of the job did not come.
        ConfigError: The job was started by torchrun.
    """
    from trainer_side.ranks.mpi_world import (
        MpiWorld,  # starts MPI: not when somebody only imports this package
    )

    end_by_exit_codes()
    world = MpiWorld.join(TrainerConfig().start_seconds_max)
    refuse_other_launchers(world.ranks)
    if backend is None:
        own_device = torch.cuda.is_available() and torch.cuda.device_count() > world.local_rank
        backend = "nccl" if world.peers().all_agree(own_device) else "gloo"
    # Rank 0 keeps the port bound until just before the store listens on it: the shortest time for a thief.
    with socket.socket() as probe:
        address = b""
        if world.rank == 0:
            probe.bind(("", 0))
            address = f"{_own_address(world)} {probe.getsockname()[1]}".encode()
        host, port = world.peers().broadcast(address if world.rank == 0 else None).decode().split()
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.ranks),
        LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR=host,
        MASTER_PORT=port,
    )
    if backend == "nccl":
        torch.cuda.set_device(world.local_rank)
    torch.distributed.init_process_group(backend, rank=world.rank, world_size=world.ranks)
    end_by_exit_codes()  # again: torch.distributed has put a hook of its own around it
    return world.rank, world.ranks


def refuse_other_launchers(ranks: int) -> None:
    """See that the ranks of `torch.distributed` are those of the MPI job: else each would save as if it were alone.

    Args:
        ranks: Training ranks of the MPI job.

    Raises:
        ConfigError: There are more of them, or the job was started by torchrun.
    """
    theirs = torch.distributed.get_world_size() if torch.distributed.is_initialized() else ranks
    if "TORCHELASTIC_RUN_ID" in os.environ and theirs == ranks:
        theirs = int(os.environ.get("WORLD_SIZE", theirs))
    if theirs != ranks:
        raise ConfigError(
            f"torch.distributed has {theirs} ranks, the MPI job has {ranks}: holdfast's ranks talk over MPI, so mpirun "
            "must start them, and not torchrun or accelerate launch; start `mpirun -n RANKS python SCRIPT : -n 1 "
            "holdfast stager --store URL`, and call init_torch_distributed() first"
        )


def _own_address(world: MpiWorld) -> str:
    """How the other ranks reach this machine."""
    return "127.0.0.1" if world.one_machine else socket.gethostname()
