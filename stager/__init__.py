"""Lv.1, the stager: runs on the on-demand machine and receives all ranks' slices into the ring without unpacking them.

    a rank offers a step:
        [1] accept or skip the step, by the free slots of the ring and the steps in flight       session/
        [2] grant credits: each names a chunk and its slot; post the receive before the credit
        [3] receive the payload straight into the slot; record FILLING, then FULL, in the journal   payloads, actions
        [4] tell the flusher about each full chunk (doorbell)                                     flusher_line
        [5] all chunks are FULL: the step is STAGED. First write the journal, then tell the ranks   actions
        [6] the flusher reports freed slots, and DURABLE: forward that to the ranks               flusher_handler

A staged checkpoint that is not yet durable is lost with this machine. The stager does not check CRCs: the flusher
checks each chunk before it writes it.

session/       decides which rank may send which chunk, and when; pure

command                          `holdfast stager`
service                          serves one job: attaches the flusher, runs the loop, shuts down; or refuses the start
standing, job_listener           a stager outside MPI: serves jobs in turn; assigns each connection to its job
own                              the stager that rank 0 of a job starts, and that ends with the job
trainers, trainers_port          the ranks, and when each was last heard; the interface of a transport
mpi, segments                    ranks in the same MPI job; leftovers in Open MPI's shared memory
tcp, payload_line, reactor       ranks over TCP; payloads from a socket into the ring; epoll
rank_handler, doubt_handler, proof_handler    handle ranks' messages; their doubts about copies; proofs of resumes
actions                          passes events to the session and executes the actions that it returns
payloads, fetches                chunks on their way into slots, and out of slots for a restore
flusher_process, flusher_line, flusher_handler    starts the flusher, holds the connection, handles its messages
notices, interval_agreement      all ranks save at one step after a notice; all change the interval at one step
previous_jobs, orphaned_rings    waits for checkpoints of earlier jobs in the ring; rings without a flusher
checks, doctor_job               the stager's part of `holdfast doctor`
"""
