"""Lv.2, the flusher: a process outside the MPI job that owns the ring and writes checkpoints to the store.

stager ─ doorbell ─► stager_handler ─► service (the loop) ─► engine ─► pipeline (pure) ─► jobs, in workers ─► store
                                           └─► verify_and_prune: read-back, retention

command, __main__   `holdfast flusher`                      lifetime         from start to end
writer_lease        one flusher for each run                flusher_context  the run that all parts work on
pipeline            events in, jobs out                     steps            its events and actions
flight              one checkpoint: chunks that have come, parts that are written
jobs, workers       the jobs, and the threads that run them
progress            the record of written parts, for the next flusher
recovery            takes over the ring of a dead flusher or stager
retry_queue         retries while the store fails           ring_room        grows a ring that is too small
listener            hears how a checkpoint ended
verify_and_prune    reads back, marks, removes              retention        which checkpoints go (pure)
read_pace           how fast to read back beside writes
stored_slices       makes files of the slices that ranks wrote to the store themselves
"""
