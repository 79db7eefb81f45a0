"""The spot watch: who says that this machine will be taken away, and what the ranks then do together.

aws, azure, gcp (http) ────────┐
signals ───────────────────────┴► watch ─► link ══► stager: holdfast/notices/decider.py ══► appointments: save at step n
                                     or ─► council ══► rank 0: chair, likewise ══► (a job without a stager)

source: what a source is.   open_sources: which of them are asked, and by which rank.
promises: a rank's side of the agreement on a step, for notices and intervals.
"""
