"""Real mpirun, real ranks, real servers: jobs/ are the training scripts that the tests start."""
