"""Persistent memory (DAX) in a QEMU guest whose power is cut: `make pm`."""
