"""The kill matrix: every process killed at every stage of a checkpoint's life, relaunched, compared.

cells ─► scenario (real jobs on a place) ─► results ─► table: docs/kill-matrix.md
"""
