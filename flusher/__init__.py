"""Lv.2: the process outside the MPI job that owns the ring and writes, publishes, verifies and prunes."""
