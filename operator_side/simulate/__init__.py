"""`holdfast simulate`: what a training job would have done under a trace of preemptions, before money is spent.

traces, trace_windows, profiles, strategy    the inputs
replay                                       the computation
study, study_plan, study_pictures            the request, its results, and their pictures
tuning, scale                                `holdfast tune`; ring and machine of a stager, from the checkpoint's size

Times are whole microseconds: the replay computes whole stretches of training in closed form, and the tests compare it
with a slow walk from iteration to iteration, which must give exactly the same numbers. The model and what it leaves
out: docs/design/015-tools-read-evidence.md.
"""
