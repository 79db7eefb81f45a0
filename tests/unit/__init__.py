"""Unit tests, in folders that mirror the source: no network, no MPI, one process."""
