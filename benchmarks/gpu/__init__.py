"""`make gpu`: measures holdfast on a real device, in one command of at most 200 seconds.

    __main__ ─► phases (phases.py), the most valuable first, each with a time limit
                   │  ══► worker.py: one process for phases that share a training and locked memory, one each for others
                   │  each figure goes to OUT/NAME.json as soon as it is known
                   ├► OUT/phases.jsonl, one line for each finished phase
                   └► report.py: OUT/report.md, each figure beside its target

A phase that dies, hangs or lacks a package says so in its JSON, and the others still run.
"""
