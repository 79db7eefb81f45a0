"""`holdfast simulate`: what a training would have done under a trace of preemptions, before money is spent.

    trace file ─► traces ─► trace_windows (many offsets, padded) ──┐
    profile    ─► profiles ─► strategy, for each of many intervals ─┴─► replay, timeline (pure, numpy) ─► study
    study_plan: what was asked for, checked          study_pictures: a study as SVG

traces, trace_windows, profiles, strategy    the inputs
replay, timeline                             the computation
study, study_plan, study_pictures            the request, its results, and their pictures
tuning, scale                                `holdfast tune`; the ring and machine of a stager, by their sizes

Times are whole microseconds: the replay computes whole stretches of training in closed form, and a slow walk from
iteration to iteration in the tests comes to the same numbers, exactly. The model and what it leaves out:
docs/design/015-tools-read-evidence.md.
"""
