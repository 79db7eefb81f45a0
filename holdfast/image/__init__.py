"""Where every byte of a checkpoint lies."""
