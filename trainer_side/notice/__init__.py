"""The spot watch: who says that this machine will be taken away, and what the ranks then do together.

aws, azure, gcp (http, words) ─┐
signals ───────────────────────┴► watch ─► link ══► stager: holdfast/notices/decider.py ══► appointments: save at step n
                                     or ─► council ══► rank 0: chair, likewise ══► (a job without a stager)

base: what a source is.
check: of the cloud's server, for `holdfast doctor`.   opening: which of them are asked, and by which rank.
"""
