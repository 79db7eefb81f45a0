"""`make gpu`: what only a real device shows, in one command of at most nine minutes.

    __main__ ─► one process per phase (phase.py), in the order of value, each with a limit of its own
                   │  each figure is written to OUT/NAME.json as soon as it is known
                   └► OUT/phases.jsonl, one line for each phase that has ended

A phase that dies, hangs or lacks a package says so in its JSON, and the others still run.
"""
