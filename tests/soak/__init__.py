"""Slow tests that extend faster ones: `make soak`."""
