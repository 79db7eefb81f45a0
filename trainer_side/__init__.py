"""Lv.0, the training processes: the package that a training script imports. Only this package may import torch.

save() ──► state/ (the tensors and plain values) ──► save/ (the copy) ──► link/ (one MPI thread) ══MPI══► stager
                                                          └──► tiers/ (local tiers of this rank)
restore() ◄── restore/ ◄── local tiers, the stager's ring, the store        notice/ ◄── the cloud's metadata server

Start with `checkpointer.py`, then follow one save.

for scripts   checkpointer, state/held, state/per_rank, state/rng, ranks/distributed; frameworks/ for others' loops
data/         samplers and streams that resume at the exact sample
state/        the user's state as the bytes of one portable file, without a copy of the tensors
save/         from `save()` to a filled staging area: plan, room, copy thread, the gate that holds optimizers back
link/         this rank's side of the connection to the stager, and its replacement in a job without a stager
restore/      from the nearest good checkpoint into live tensors: inventory, choice, reading, exchange, loading
tiers/        local tiers in memory, persistent memory, files and the store
ranks/        MPI, torch.distributed, deadlines
notice/       preemption notices of this machine, and the step at which all ranks save after one
pace/         `every="auto"`: measures what checkpoints cost, and asks for another interval
convert/      the parts of `holdfast export` and `holdfast import` that need torch
joining, ledger, transfer, checks    how a rank joins the job, the counts of its checkpoints, the state of one step on
              its way, and the trainers' part of `holdfast doctor`
opaque        keeps torch.compile out of all of this
leaving       the end of a rank's part in its job, with an exception or without
seat          one Checkpointer in a process, and none in its forked children
background_thread  how a thread of this rank runs, and what is said when one dies
whole_number  what counts as a step, a rank or a seed where a script hands one over
"""

from trainer_side.checkpointer import Checkpointer
from trainer_side.data.sampler import ResumableSampler
from trainer_side.data.seeded import SeededSamples
from trainer_side.data.stream import ResumableStream
from trainer_side.ranks.distributed import init_torch_distributed
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState
from trainer_side.state.split_tensor import Split

__all__ = [
    "Checkpointer",
    "PerRank",
    "ResumableSampler",
    "ResumableStream",
    "RngState",
    "SeededSamples",
    "Split",
    "init_torch_distributed",
]
