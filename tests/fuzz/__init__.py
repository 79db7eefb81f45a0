"""Hostile input for every parser and command; run `guided.py` by hand for fuzzing by coverage
(docs/threat-model.md).
"""
