"""Lv.2: the process outside the MPI job that owns the ring and writes, publishes, verifies and prunes.

stager ─ ─ doorbell ─ ─► stager_desk ─► service (the loop) ─► engine ─► pipeline (pure) ─► jobs, in workers ─► store
                                            └─► upkeep: read back, retention

command    `holdfast flusher`        lifetime   start to end        instance, tenure   one a machine, one a run
flight     one checkpoint: what came, what is written               steps    the pipeline's words: events, actions
progress   what the store has of it, for the next flusher           recovery what a ring holds that nobody spoke of
listener, ends    who hears how a checkpoint ended, also later      workers   the threads
held, later, retention    a store that fails; what is tried again; what may go (pure)
slices     those that ranks wrote to the store themselves, made into files
"""
