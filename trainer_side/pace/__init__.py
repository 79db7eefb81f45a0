"""`every="auto"`: how often this job saves, by what its checkpoints cost it.

    rank 0       profile ─► governor (holdfast/policy) ─► pacer ── WISH ──► stager: stager/interval_agreement.py
    every rank   schedule ◄────────────────────────────── SAVE_EVERY ────────────────┘

schedule: at which steps this rank saves, the same on all.   pacer: measures and wishes.   profile: what was measured.
"""
