"""When to checkpoint: pure arithmetic on measurements. No clock, no I/O.

    Cost (stall, staged, durable, places) ─► shortest interval within a bound ──┐
    Hazard (losses per hour, price)       ─► interval with the smallest loss ───┴─► Advice: steps, and one line why
      set by the user, or estimated from the run
    Advice of each checkpoint             ─► governor: change only for a lasting difference ──► Change

In `holdfast` because two packages need it: the trainer acts on it (trainer_side/pace), and `holdfast simulate` tries it
out. Sources and what was rejected: docs/design/011-one-step-for-all-ranks.md.
"""
