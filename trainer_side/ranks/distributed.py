"""`torch.distributed` among the training ranks of the job, under every launcher.

    mpirun    ranks 0 … R-1 ─► RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT ─► init_process_group
    torchrun  a part of the job's store that no earlier start has used ────────────────► init_process_group

Under mpirun the stager is a process of the job but no rank of `torch.distributed`, so mpirun's own variables would be
wrong. torchrun keeps one store for all starts of a job, and gloo of a new start would read addresses of an old one.
"""

from __future__ import annotations

import os
import socket
from typing import Literal

import torch
from torch.distributed.constants import default_pg_timeout

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from trainer_side.ranks.joined import join_world
from trainer_side.ranks.uncaught import install_exit_code_hook
from trainer_side.ranks.world import World


def init_torch_distributed(backend: Literal["gloo", "nccl"] | None = None) -> tuple[int, int]:
    """Set up `torch.distributed` among the training ranks of this job, with or without a stager. Collective.

    Works under mpirun, torchrun, and launchers that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        backend: `gloo` or `nccl`; None takes `nccl` if every rank can have a GPU of its own.

    Returns:
        This rank and the number of ranks.

    Raises:
        PeerLost: A process of the job did not join in time.
        ConfigError: The environment does not name this rank or the meeting point, `stager` is set under mpirun, or
            `backend` is `nccl` and this rank has no CUDA device.
    """
    install_exit_code_hook()
    world = join_world(TrainerConfig())
    own_device = torch.cuda.is_available() and torch.cuda.device_count() > world.local_rank
    if backend == "nccl" and not own_device:
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ConfigError(
            f'init_torch_distributed("nccl"): rank {world.rank} is number {world.local_rank} of this machine and needs '
            f"a CUDA device of its own; torch finds {devices} here. Leave the backend out: it is gloo where devices "
            "are missing; or start fewer ranks on this machine"
        )
    if backend is None:
        backend = "nccl" if world.peers().all_agree(own_device) else "gloo"
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.ranks), LOCAL_RANK=str(world.local_rank))
    store = world.torch_store()
    if store is None:
        _agree_on_master_address(world)
    else:
        store.set_timeout(default_pg_timeout)
    if backend == "nccl":
        torch.cuda.set_device(world.local_rank)
    torch.distributed.init_process_group(backend, store=store, rank=world.rank, world_size=world.ranks)
    install_exit_code_hook()  # again: torch.distributed has wrapped the hook in its own
    return world.rank, world.ranks


def _agree_on_master_address(world: World) -> None:
    # Rank 0 keeps the port bound until just before the store listens on it, so that no other process takes it.
    with socket.socket() as probe:
        address = b""
        if world.rank == 0:
            probe.bind(("", 0))
            own = "127.0.0.1" if world.one_machine else socket.gethostname()
            address = f"{own} {probe.getsockname()[1]}".encode()
        host, port = world.peers().broadcast(address if world.rank == 0 else None).decode().split()
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
