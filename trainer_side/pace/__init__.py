"""`every="auto"`: the interval between the checkpoints of this job, chosen from what they cost.

    rank 0       step_profile ─► governor (holdfast/policy) ─► pacer ── WISH ──► stager: stager/interval_agreement.py
    every rank   schedule ◄────────────────────────────── SAVE_EVERY ──────────────────┘

step_profile: the measurements.   pacer: asks for another interval.   schedule: the steps at which all ranks save.
"""
