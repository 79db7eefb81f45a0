"""Preemption notices: sources that tell of the end of this machine, and the step at which all ranks then save.

aws, azure, gcp (http) ────────┐
signals ───────────────────────┴► watch ─► link ══► stager: holdfast/notices/decider.py ══► appointments: save at step n
                                     or ─► council ══► rank 0: chair (a job without a stager) ══► the same

source: the interface of a source.   open_sources: chooses the sources, and the rank that asks them.
promises: a rank's side of the agreement on a step, for notices and for intervals.
"""
