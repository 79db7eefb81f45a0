"""Lv.1. The MPI rank on the on-demand node: receives every rank's slices into the ring, and never unpacks them.

trainers ══MPI══► mpi ─► service ─► ring ─ ─ ─ (doorbell: holdfast.ring.doorbell) ─ ─ ─► flusher
                    session (holdfast): who may send what, when

command    `holdfast stager`                 service   the loop, from the first rank to the last durable step
trainer_desk   what is heard of the ranks    flusher_desk   what is heard of the flusher, and the next one taken
actions    events to the session, and what it says carried out
trainers   who is there, and last heard      payloads  on their way into slots    fetches   out of them, for a restore
notices    preemption notices    interval_agreement    the interval: both, one step of all ranks
refusal    a start that fails is told to every trainer
flusher_process, flusher_line, replay    finds or starts the flusher; holds the line to it; tells the next one all
inheritance, segments    what earlier jobs have left: in the ring, and of Open MPI in shared memory
checks, mpi_probe        the stager's part of `holdfast doctor`
"""
