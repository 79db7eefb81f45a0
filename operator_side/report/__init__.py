"""`holdfast report`: what happened in a run, as one page that needs no server.

    event logs, manifests ─► rows.py, attempts.py, goodput.py ─► facts.py ─► sentences, tiles, charts ─► page.py

Pure: operator_side/commands/report.py reads the files, whose contents are untrusted input. docs/report.md explains each
figure.
"""
