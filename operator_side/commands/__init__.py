"""The tools of the `holdfast` command, one file each. They need neither torch nor MPI.

ls, inspect, verify, pull             read a store: target (`URL[@STEP]`) ─► Catalog ─► output
rewind                                a new branch of a run, from an older checkpoint on
export, import_state, diff            files of other tools, and what differs; torch's part is trainer_side.convert
run, cluster, doctor, drill           the supervised job, machines on AWS, a check of this machine, kills as a test
rank_command                          exit codes for engines that restart jobs themselves
status, report                        a run while it goes on, and afterwards
simulate, tune                        what a trace of preemptions would do to a job; settings from measured figures
explain, completion, init             what to do about an error; completion for shells; lines for a script

options, target, partial, claimed     shared by several of them
run_with_torchrun                     options and job of `holdfast run --launcher torchrun`
simulate_output, status_output        how the terminal shows a study and a run
status_web                            serves the page of a run

The roles add `stager` and `flusher` by an entry point.
"""
