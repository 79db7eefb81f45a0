"""The frame of the `holdfast` command; the tools are in operator_side."""
