"""Lv.1. The MPI rank on the on-demand node: receives every rank's slices into the ring, and never unpacks them.

trainers ══MPI══► mpi ─► service ─► ring ─ ─ ─ (doorbell: holdfast.ipc) ─ ─ ─► flusher
                    session (holdfast): who may send what, when

command  `holdfast stager`          flusher_process  starts the flusher, or finds the one that is there
service  the loop                   agreement        whether all ranks hold the same tensors
"""
