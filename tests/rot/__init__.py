"""Flips bytes (flips.py) in ring, wire, file, manifest, journal and slice: each flip is detected."""
