"""The stager node's shared memory.

ring, journal, directory       the pool of slots; which chunk lies in each; where both lie on this machine
doorbell                       messages between stager and flusher
pages, growth                  huge pages; how far a ring without a configured size grows
near_ring, remains             reading the ring on the same machine; checkpoints left in it
side_files, checkpoint_record  files beside the ring; the one of a checkpoint in it
doubts, proofs                 the files of doubted steps, and of what the steps after checkpoints used
ring_keeper                    the lock of a supervisor, and the checkpoints that it has set aside
"""
