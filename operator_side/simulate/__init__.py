"""`holdfast simulate`: what a training would have done under a trace of preemptions, before money is spent.

    trace file ─► traces ─► windows (many offsets, padded) ─┐
    profile    ─► profiles ─► strategies × intervals        ─┴─► replay (pure, numpy) ─► study ─► tables, JSON, pictures

Times are whole microseconds: the replay computes whole stretches of training in closed form, and a slow walk from
iteration to iteration in the tests comes to the same numbers, exactly. The model and what it leaves out:
docs/design/020-simulation.md.
"""
