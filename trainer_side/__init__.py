"""Lv.0, the training processes. Only this package may import torch; scripts import its names from `holdfast`.

    save(step):
        [1] describe the state: plain values, tensors, and the regions that this rank holds          state/
            if the set of tensors has changed: all ranks agree on one layout of the file             save/, link/
        [2] reserve a staging area, and offer the step to the stager; skip the step if there is no room
        [3] copy plain values and buffers now; copy this rank's slice layer by layer                 save/
            while training continues: optimizer.step() waits only for a layer that is being copied
        [4] compare the copy with the live tensors; withdraw the step on all ranks if it is torn
        [5] send each chunk with its CRC when the stager grants a credit                             link/, ranks/
            at the same time: write the slice into the local tiers                                   tiers/
        [6] the stager reports STAGED, and the flusher DURABLE: free the area, record the time       ledger

    restore():
        [1] list the checkpoints in local tiers, the stager's ring and the store                     restore/
        [2] take the newest one that is whole, from the nearest place that has it
        [3] read this rank's share, check its CRCs, exchange the rest with the other ranks
        [4] load tensors in place, then plain values; if the checkpoint is damaged, try the one before

Not guaranteed: that every step asked for is saved (a full ring or area skips one), that a step survives the loss of its
ranks before STAGED, and that training is bit-identical with another number of ranks.

checkpointer   start here: the class that a script uses
builder        joins the job, and puts the parts of a Checkpointer together
data/          samplers, streams and draws that resume at the exact sample
state/         the user's state as the bytes of one portable file, without a copy of the tensors
save/          from `save()` to a filled staging area
link/          this rank's side of the connection to the stager, and its replacement in a job without a stager
restore/       from the nearest good checkpoint into live tensors
tiers/         local tiers in memory, persistent memory, files and the store
ranks/         the other ranks: MPI, torch.distributed, TCP to the stager, deadlines
notice/        preemption notices of this machine, and the step at which all ranks save after one
proof/         compares the first step after a resume with that of the run before
pace/          `every="auto"`: measures the cost of checkpoints, and asks for another interval
convert/        the parts of `holdfast export` and `holdfast import` that need torch
frameworks/    Lightning, Trainer, Accelerate, torchtitan; experiment trackers
trackers/      the runs of experiment trackers, and marks about checkpoints in them

joining, leaving     a rank's start in its job, and its end, with or without an exception
ledger, transfer     the counts of this rank's checkpoints, and the state of one step in flight
start_line           how often and where this job saves, in one line
seat                 allows one Checkpointer per process, and none in forked children
checks               the trainers' part of `holdfast doctor`
opaque               keeps torch.compile out of holdfast's code
background_thread    runs a thread of this rank, and reports its death
whole_number         checks a step, a rank or a seed that a script passes
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_side.checkpointer import Checkpointer
    from trainer_side.data.draw import ResumableDraw
    from trainer_side.data.sampler import ResumableSampler
    from trainer_side.data.seeded import SeededSamples
    from trainer_side.data.stream import ResumableStream
    from trainer_side.ranks.distributed import init_torch_distributed
    from trainer_side.state.per_rank import PerRank
    from trainer_side.state.rng import RngState
    from trainer_side.state.split_tensor import Split
else:
    from holdfast.lazy import lazy_names

    _MODULES = {
        "trainer_side.checkpointer": ("Checkpointer",),
        "trainer_side.data.draw": ("ResumableDraw",),
        "trainer_side.data.sampler": ("ResumableSampler",),
        "trainer_side.data.seeded": ("SeededSamples",),
        "trainer_side.data.stream": ("ResumableStream",),
        "trainer_side.ranks.distributed": ("init_torch_distributed",),
        "trainer_side.state.per_rank": ("PerRank",),
        "trainer_side.state.rng": ("RngState",),
        "trainer_side.state.split_tensor": ("Split",),
    }
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

__all__ = [
    "Checkpointer",
    "PerRank",
    "ResumableDraw",
    "ResumableSampler",
    "ResumableStream",
    "RngState",
    "SeededSamples",
    "Split",
    "init_torch_distributed",
]
