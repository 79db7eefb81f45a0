"""`holdfast drill`: kills a user's own script under `holdfast run` at random points, and checks how it resumes.

run_drill, kill_plan                  runs the script twice, with kills drawn from a seed, and reports progress
drill_run, torchrun_run               one run: `holdfast run`, with mpirun or with torchrun
findings, batches                     the finding of each kill; the batches of two runs
compare, values                       compares checkpoints value by value; ignores times measured by a clock
"""
