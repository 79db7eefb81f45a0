"""`holdfast report`: what happened in a run, as one page that needs no server, for who was not there.

    event logs ──► reading.py ──┐
    manifests ──────────────────┼─► checkpoints.py  each checkpoint, its phases and ranks; what was not taken
                                ├─► attempts.py     each attempt, how it ended, and the way back
                                └─► goodput.py      what the time went into
    facts.py: all of it ─► sentences.py  what happened, and what to look at
                        └► page.py ◄─ sections.py ◄─ pictures.py, tables.py ◄─ markup.py (escapes), thinning.py (bounds)

Pure but for reading.py; what comes from files is input from outside. docs/report.md says what each figure means.
"""
