"""The messages between training ranks and the stager, and among the ranks.

frames, welcome                      control messages; the stager's first message
layout_round, state_messages         the ranks' agreement on a layout, and its messages
state_union                          trees that differ between ranks
replica_proof, doubt                 whether replicas are equal; a rank's doubt about its copies
pace                                 the interval at which all ranks save
failure_count                        failures of a run so far, on which the interval depends
step_proof                           digests of the step after a checkpoint, and the result of a resume
"""
