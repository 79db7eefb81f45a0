"""Samplers and streams that resume at the exact sample, on any number of ranks."""
