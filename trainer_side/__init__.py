"""Lv.0: what a training script imports. The only package of holdfast that may import torch.

save ─► plan ─► room ─► copy behind the gate ─► link (the one MPI thread) ══MPI══► stager
                                             └► keeper ─► local tiers (tiers/)
restore ◄── local tiers and store, shared out among the ranks            notices of the machine's end ◄── notice/

Start with `checkpointer`, then read the way of one save.

for the script   checkpointer, per_rank, rng, distributed; in the loops of others: frameworks/
the data         data     which samples, and the cursor         permutation   the order of an epoch
                 stream   samples without a number              seeded   augmentations
how often        pace/    every="auto": profile, governor, schedule
a save           saver    from call to return                   planner   what is copied, as all ranks agreed
                 room     areas and slots, the wait for them    ledger    what became of each
the state        state, outline, survey   its tensors, and who may change them
                 table    what the ranks compare                recall    the quick way where only values have changed
                 snapshot plain values as they were, for a pickle that is made later
the file         skeleton its bytes without the tensors', made of image, zip_parts, pickling, blobs
the copy         copier   the thread                            gate, split_step    who waits for it
                 copy_plan   in which order                     copy_engine, device_copy   how
                 staging, areas, huge, slot_memory   where to   fingerprint   of the replicas
to the stager    link     the MPI thread                        mpi       the only MPI calls
                 outbox   all steps on their way                questions what the stager is asked
                 outgoing, transfer, verdicts   one of them, and what was said of it    pauses   of the thread
                 joining  how a rank meets its job              alone     in place of the link
back             restore, trial   one candidate after the other
                 findings, sources, origins   what there is, and where
                 rounds, reading, windows, received, crew   bytes into tensors, all of them checked
                 structure, described, nesting, loading     from the pickle to live objects
                 agreeing, peers   what all ranks do together   patience  calls that may never return
                 checks   the trainers' part of `holdfast doctor`
others           doors/   what `holdfast export` and `holdfast import` need torch for
"""

from trainer_side.checkpointer import Checkpointer
from trainer_side.data.sampler import ResumableSampler
from trainer_side.data.seeded import SeededSamples
from trainer_side.data.stream import ResumableStream
from trainer_side.ranks.distributed import init_torch_distributed
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState

__all__ = [
    "Checkpointer",
    "PerRank",
    "ResumableSampler",
    "ResumableStream",
    "RngState",
    "SeededSamples",
    "init_torch_distributed",
]
