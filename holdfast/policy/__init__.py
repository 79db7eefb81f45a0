"""When to checkpoint: pure arithmetic on what was measured. No clock, no I/O.

    Cost (stall, staged, durable, places) ─► least interval that keeps a bound ─┐
    Hazard (losses per hour, price)       ─► interval that loses least ─────────┴─► Advice: steps, and one line why
      typed, or of what the run has seen
    Advice of each checkpoint             ─► governor: change only for what stays ──► Change

It lies in the leaf because two need the same answer: the trainer, which acts on it (trainer_side/pace), and `holdfast
simulate`, which tries it out. Sources and what was rejected: docs/design/011-one-step-for-all-ranks.md.
"""
