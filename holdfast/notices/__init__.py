"""Preemption notices: all ranks agree on one step, and save it."""
