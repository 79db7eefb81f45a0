"""Jobs that tests of this folder start."""
