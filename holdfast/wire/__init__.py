"""The messages between training ranks and the stager."""
