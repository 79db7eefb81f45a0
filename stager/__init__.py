"""Lv.1, the stager: on the on-demand machine, it receives all ranks' slices into the ring without unpacking them.

    a rank offers a step:
        [1] accept or skip it, by the free slots of the ring and the steps in flight             session/
        [2] grant credits: each names a chunk and the slot that it goes to; post the receive first
        [3] receive the payload straight into the slot; record FILLING, then FULL, in the journal   payloads, actions
        [4] tell the flusher about each full chunk (doorbell)                                     flusher_line
        [5] all chunks are FULL: the step is STAGED. First write the journal, then tell the ranks   actions
        [6] the flusher reports slots that are free again, and DURABLE: pass it on to the ranks   flusher_handler

Not guaranteed: that a staged checkpoint survives the loss of this machine before it is durable. CRCs are not checked
here: the flusher checks each chunk before it is written.

session/       decides which rank may send which chunk, and when; pure

command                          `holdfast stager`
service                          one job: its flusher, its loop, its end; or tells every rank why a start fails
standing, job_listener           a stager outside MPI: one job after the other; accepts connections, finds their job
own                              one that rank 0 of a job has started, and that ends with the job
trainers, trainers_port          the ranks, when each was last heard; the interface of a transport
mpi, segments                    ranks in the same MPI job; leftovers in Open MPI's shared memory
tcp, payload_line, reactor       ranks over TCP; payloads from a socket into the ring; epoll
rank_handler, doubt_handler, proof_handler    handle the messages of ranks; their doubts about copies; proofs of resumes
actions                          gives events to the session, and carries out its answers
payloads, fetches                chunks on their way into slots, and out of slots for a restore
flusher_process, flusher_line, flusher_handler    starts the flusher, holds the connection, handles its messages
notices, interval_agreement      all ranks save at one step after a notice; all change the interval at one step
previous_jobs, orphaned_rings    waits for checkpoints of earlier jobs in the ring; rings that nobody else serves
checks, doctor_job               the stager's part of `holdfast doctor`
"""
