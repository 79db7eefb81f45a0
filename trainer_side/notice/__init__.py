"""Preemption notices: sources that tell of the end of this machine, and the step at which all ranks then save.

aws, azure, gcp (http) ──┐
signals ─────────────────┴► watch ─► preemption_notices ══► stager: holdfast/notices/preemption.py ══► agreed_steps
                                          or without one ══► rank 0: the council's chair ════════════► agreed_steps

source: the interface of a source.   open_sources: chooses the sources, and the rank that asks them.
promised_steps: a rank's side of the agreement on a step, for notices and for intervals.
"""
