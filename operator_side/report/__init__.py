"""`holdfast report`: what happened in a run, as one page that needs no server.

    event logs ─┬─► holdfast/telemetry/rows.py   each checkpoint, its phases and ranks; steps without a checkpoint
    manifests ──┘   attempts.py                  each attempt, how it ended, and its recovery
                    goodput.py                   the parts of the time
    facts.py: all facts ─► sentences.py          what happened, and what to look at
                        ├► run_tiles.py          goodput, lost steps, cost, interruptions, the last good step
                        ├► run_charts.py         the contents of its charts
                        └► page.py ─► report.html, with the parts in operator_side/page

Pure: operator_side/commands/report.py reads the files, whose contents are untrusted input. docs/report.md explains each
figure.
"""
