"""The messages between training ranks and the stager, and among the ranks.

frames, welcome                      control messages; the stager's first one
layout_round, state_messages         how the ranks agree on a layout, and what they send for it
state_union, union_table, held_regions    trees that differ between ranks, and the regions that a rank holds
replica_proof, doubt                 whether replicas are equal; a rank's doubt about its copies
pace                                 the interval at which all ranks save
failure_count                        the failures that a run has seen, on which the interval depends
step_proof                           what the step after a checkpoint used, and how a resume went
"""
