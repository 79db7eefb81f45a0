"""Hostile input for every parser and command; `guided.py` goes on by coverage, by hand (docs/threat-model.md)."""
