"""What `make check` runs of this folder."""
