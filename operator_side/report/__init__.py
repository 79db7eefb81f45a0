"""`holdfast report`: what happened in a run, as one page that needs no server.

    event logs ─┬─► holdfast/telemetry/rows.py   each checkpoint, its phases and ranks; what was not taken
    manifests ──┘   attempts.py                  each attempt, how it ended, and the way back
                    goodput.py                   the parts of the time
    facts.py: all of it ─► sentences.py          what happened, and what to look at
                        └► page.py ─► page.html (Jinja) ◄─ chart.py, words.py (times, money)

Pure: operator_side/commands/report.py reads the files, whose contents are input from outside. docs/report.md says what
each figure means.
"""
