"""Hostile input for every parser and command; `guided.py`, run by hand, fuzzes by coverage (docs/threat-model.md)."""
