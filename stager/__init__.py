"""Lv.1, the stager: receives all ranks' slices into the ring, unread, on a machine that is not reclaimed.

ranks ══ MPI or TCP ══► trainers_port ─► service ─► ring ─ ─ ─ (doorbell: holdfast.ring.doorbell) ─ ─ ─► flusher
                                session/: which rank may send what, and when

command          `holdfast stager`                 service          one job, from its first rank to its end
mpi              the ranks of the same MPI job     standing         serves one job after the other over TCP
tcp              the ranks of a job over TCP       job_listener     accepts connections, proves the key, admits a job
reactor          the sockets that are ready        payload_line     payloads from a socket into their slots
rank_handler     messages of the ranks             flusher_handler  messages of the flusher
actions          gives events to the session, and carries out its answers
trainers         the ranks, and when each was last heard            payloads         chunks on their way into slots
fetches          chunks on their way out of slots, for a restore    doubt_handler    steps that may be torn
notices, interval_agreement    all ranks save at one step, after a preemption notice or at a new interval
flusher_process, flusher_line  finds or starts the flusher, and holds the connection to it
previous_jobs    checkpoints of earlier jobs that are still being written
segments         leftovers of earlier jobs in Open MPI's shared memory
checks, doctor_job             the stager's part of `holdfast doctor`
"""
