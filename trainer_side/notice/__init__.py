"""The spot watch: who says that this machine will be taken away, and what the ranks then do together."""
