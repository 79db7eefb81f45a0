"""The training rank's side of the connection to the stager."""
