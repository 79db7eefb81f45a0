"""Lv.2, the flusher: a process outside the MPI job that owns the ring and writes checkpoints to the store.

stager ─ ─ doorbell ─ ─► stager_desk ─► service (the loop) ─► engine ─► pipeline (pure) ─► jobs, in workers ─► store
                                            └─► maintenance: read-back, retention

command    `holdfast flusher`            lifetime    from start to end        lease      one flusher for each run
flight     one checkpoint: which chunks have come, and which are written      steps       events and actions of pipeline
progress   the record of written parts, for the next flusher                  recovery    takes over a ring
listener   the processes that are told how a checkpoint ended                 workers     the threads
held       retries while the store fails                                      retention   which checkpoints go (pure)
stored_slices    makes files of the slices that ranks have written to the store themselves
"""
