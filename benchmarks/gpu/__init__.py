"""`make gpu`: what only a real device shows, in one command of at most 200 seconds.

    __main__ ─► phases (phases.py) in the order of value, each until a time of its own
                   │  ══► worker.py: one process for those that share a training and locked memory, one each for others
                   │  each figure is written to OUT/NAME.json as soon as it is known
                   ├► OUT/phases.jsonl, one line for each phase that has ended
                   └► report.py: OUT/report.md, each figure beside its target

A phase that dies, hangs or lacks a package says so in its JSON, and the others still run.
"""
