"""Preemption notices: sources that announce the preemption of this machine, and the step at which all ranks then save.

    a source ─► watch ─► PreemptionNotices ══► stager: holdfast/notices/preemption.py ══► agreed_steps
                               or without one ══► rank 0: Rank0PreemptionCoordinator ════► agreed_steps

open_sources             chooses the sources, and the rank that polls them; the notices of this rank
signals                  signals of this process
lost_siblings            distinguishes SIGTERM of torchrun after the death of a rank from a notice
http, aws, azure, gcp    a bounded request to a metadata server; the metadata services of the clouds
watch                    the interface of a source; the thread that polls the sources
agreed_steps             the steps that all ranks have agreed on after a notice
promised_steps           a rank's side of an agreement on a step, for notices and for intervals
"""
