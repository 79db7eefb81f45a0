"""Lv.0: what a training script imports. The only package of holdfast that may import torch.

    state ─► skeleton ─► staging areas (slices, gate, copy thread) ─► link (the one MPI thread) ══MPI══► stager
    restore ◄── store, shared out among the ranks

    state      walks the user's state: paths, ownership    skeleton  the file without its tensor bytes
    staging    this rank's slice, copied behind the gate   areas     how many of them are in flight
    gate       holds back optimizer.step()                 copy_*    what is copied in which order, and how
    link, mpi  transfer to the stager; the only MPI calls  restore   reads back, on any number of ranks
    per_rank, rng, data, distributed: what a script needs so that it continues exactly

Start with `Checkpointer`.
"""

from trainer_side.checkpointer import Checkpointer
from trainer_side.data import ResumableSampler
from trainer_side.distributed import init_torch_distributed
from trainer_side.per_rank import PerRank
from trainer_side.rng import RngState

__all__ = ["Checkpointer", "PerRank", "ResumableSampler", "RngState", "init_torch_distributed"]
