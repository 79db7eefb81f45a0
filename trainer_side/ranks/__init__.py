"""Communication of a rank with the other ranks and the stager, over MPI or TCP and torch.distributed.

peers, ports, deadlines          interfaces for restore, stager and council; calls that may never return
joined, world, distributed       detects the job's launcher; the connections of its job; sets up torch.distributed
mpi, mpi_*                       a job of mpirun
c10d_*                           a job without MPI: ranks meet in a key-value store
tcp_stager_port, connecting, payload_sender    the stager over TCP
started_stager                   a stager that rank 0 has started
uncaught                         one message and one exit code for an uncaught error
"""
