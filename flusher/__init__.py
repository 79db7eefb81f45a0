"""Lv.2, the flusher: a process outside the MPI job that owns the ring and writes checkpoints to the store.

    the stager reports a full chunk:
        [1] check each sender's CRC; patch the CRC fields of the zip file into the chunk           pipeline, jobs
        [2] write the part as soon as its chunks are complete, and free their slots                workers, jobs
            after each part: record it beside the ring, so that the next flusher resumes here      progress
        [3] all parts are written and the step is staged: check the lease on the run               writer_lease
        [4] publish the file, then the manifest: the step is DURABLE                               jobs
        [5] read the file back and compare; write `verified` or `bad` into the manifest            verify_and_prune
        [6] remove older checkpoints by the retention rule, never the newest verified one          retention

    the store fails: keep checkpoints in the ring, retry with growing pauses, report once          retry_queue
    the flusher dies: the next one takes over ring, journal and records                            recovery

    several flushers write one file, each a run of parts (holdfast/image/shares.py):
        [3] seal the share: all its parts are written                                              share_jobs
        [4] the lead, which alone holds the lease, publishes when every share is sealed

A checkpoint whose ranks died before it was staged is discarded.

command                      `holdfast flusher`
lifetime, writer_lease       start and shutdown in order; the lease that makes this the run's only flusher
service, stager_handler, listener    the event loop; the connection to one stager; callbacks for outcomes
engine, flusher_context      joins pipeline, threads and ring; the objects that all parts share
job_runner, flush_events     runs jobs in threads, with retries; the event log's entries about checkpoints
pipeline, steps, flight      the pure core; its events and actions; one checkpoint in flight
jobs, workers                what each job does to bytes and store; the worker threads
share_jobs, share_polls, orphaned_shares  several flushers of one image: records, polling, shares whose lead is gone
progress, recovery           the record of written parts; the takeover of a ring
retry_queue, succession      retries while the store fails; when an older checkpoint makes room for the newest
verify_and_prune, read_pace, retention    read-back and removal; the pace of reads beside writes; the retention rule
ring_room                    memory of the ring: huge pages, growth
doubt_marks, proof_writing   marks checkpoints that may be torn; writes proofs of resumes beside checkpoints
"""
