"""Lv.1, the stager: the MPI rank on the on-demand machine, which receives all ranks' slices into the ring unread.

trainers ══MPI══► mpi ─► service ─► ring ─ ─ ─ (doorbell: holdfast.ring.doorbell) ─ ─ ─► flusher
                    session/: which rank may send what, and when

command        `holdfast stager`                 service    the loop, from the first rank to the last durable step
trainer_desk   messages of the ranks             flusher_desk    messages of the flusher
actions        gives events to the session, and carries out its answers
trainers       the ranks, and when each was last heard           payloads    chunks on their way into slots
fetches        chunks on their way out of slots, for a restore   refusal     tells every trainer why a start fails
notices, interval_agreement    all ranks save at one step, after a preemption notice or at a new interval
flusher_process, flusher_line  finds or starts the flusher, and holds the line to it
inheritance, segments    leftovers of earlier jobs: in the ring, and in Open MPI's shared memory
doctor_job, checks       the stager's part of `holdfast doctor`
"""
