"""Samplers, streams and draws that resume at the exact sample, on any number of ranks."""
