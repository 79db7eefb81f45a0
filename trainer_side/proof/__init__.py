"""Proof of a resume: compares the first step after a restore with the same step of the previous run.

step S, saved ─► mark      step S+1: digest ─► stager ─► ring ─► flusher ─► step-….proof.json
restored S   ─►            step S+1: digest ─► compared on all ranks ─► one line, an event, `on_unproven`
"""
