"""What to do about a preemption notice: one step at which all ranks save."""
