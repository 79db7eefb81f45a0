"""What takes long and shows more of what another test shows: `make soak`."""
