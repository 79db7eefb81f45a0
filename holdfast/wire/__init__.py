"""The messages between training ranks and the stager, and among the ranks."""
