"""Proof of a resume: compares the first step after a restore with the same step of the previous run.

    step S, saved ─► mark      step S+1: digest ─► stager ─► ring ─► flusher ─► step-….proof.json
    restored S   ─►            step S+1: digest ─► compared on all ranks ─► one line, an event, `on_unproven`

step_digest, digest_taker     the inputs and results of a step, as JSON; collects them without waiting for a device
comparison                    the differences between two digests, and their usual causes; pure
resume_check                  records digests, finds recorded ones, compares them on all ranks, reports the verdict
"""
