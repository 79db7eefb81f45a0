"""The place of every byte of a checkpoint."""
