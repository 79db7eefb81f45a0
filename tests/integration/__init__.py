"""Tests with real mpirun, ranks and servers; jobs/ has the training scripts that they start."""
