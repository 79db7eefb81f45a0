"""A byte flipped anywhere (flips.py): ring, wire, file, manifest, journal, slice. Each flip is found."""
