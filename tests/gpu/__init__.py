"""What only a CUDA device shows. Skipped without one."""
