"""The part of this folder that `make check` runs."""
