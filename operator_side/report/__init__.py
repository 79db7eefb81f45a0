"""`holdfast report`: what happened in a run, as one page that needs no server.

    event logs ─┬─► holdfast/telemetry/rows.py   each checkpoint, its phases and ranks; what was not taken
    manifests ──┘   attempts.py                  each attempt, how it ended, and the way back
                    goodput.py                   the parts of the time
    facts.py: all of it ─► sentences.py          what happened, and what to look at
                        ├► run_tiles.py          goodput, lost steps, cost, interruptions, the last good step
                        ├► run_charts.py         what its charts show
                        └► page.py ─► report.html, of the parts in operator_side/page

Pure: operator_side/commands/report.py reads the files, whose contents are input from outside. docs/report.md says what
each figure means.
"""
