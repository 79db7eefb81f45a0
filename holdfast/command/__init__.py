"""The frame of the `holdfast` command; the subcommands are in operator_side, stager and flusher."""
