"""Proof of a resume: the first step after a restore is compared with the same step of the run before.

    step S, saved ─► mark      step S+1: digest ─► stager ─► ring ─► flusher ─► step-….proof.json
    restored S   ─►            step S+1: digest ─► compared on all ranks ─► one line, an event, `on_unproven`

step_digest, digest_taker     what one step used, as JSON; takes it from the state, without waiting for a device
comparison                    what differs between two of them, and what that usually means; pure
resume_check                  records, finds what was recorded, compares on all ranks, says it
"""
