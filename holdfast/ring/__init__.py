"""The stager node's shared memory.

ring, journal, directory       the pool of slots; which chunk lies in each; where both lie on this machine
doorbell                       messages between stager and flusher
pages, growth                  huge pages; the size of a ring that nobody has set
near_ring, remains             reading the ring on the same machine; checkpoints left in it
side_files, checkpoint_record  files beside it; that of a checkpoint in it
doubts, proofs                 and those of doubted steps, and of the steps after checkpoints
set_aside, ring_keeper         steps set aside; the lock of a supervisor
"""
