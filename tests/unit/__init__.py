"""Mirrors the source, file by file: no network, no MPI, one process."""
