"""A rank's way to the other ranks: MPI or torch.distributed, deadlines.

peers, ports, deadlines          the interfaces for restore, stager and council; calls that may never return
joined, distributed              how this job was started; torch.distributed
mpi, mpi_*                       a job of mpirun
c10d_*                           a job without MPI: ranks meet in a key-value store
tcp_stager_port, connecting, payload_sender    the stager over TCP
started_stager                   a stager that rank 0 has started
uncaught                         one message and one exit code for an error that nobody catches
"""
