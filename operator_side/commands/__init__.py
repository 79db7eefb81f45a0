"""The tools of the `holdfast` command, one file each. They need neither torch nor MPI.

ls, inspect, verify, pull             read a store: target (`URL[@STEP]`) ─► Catalog ─► output
rewind                                starts a new branch of a run at an older checkpoint
export, import_state, diff            convert and compare checkpoints; trainer_side.convert has the part with torch
run, cluster, doctor, drill           the supervised job, machines on AWS, a check of this machine, a test with kills
rank_command                          exit codes for engines that restart jobs themselves
status, report                        show a running job, and a finished one
simulate, tune                        replay a trace of preemptions; compute settings from measured figures
explain, completion, init             explain an error; complete commands in shells; print lines for a script

options, target, partial, claimed     shared by several commands
run_with_torchrun                     options and job of `holdfast run --launcher torchrun`
simulate_output, status_output        print a study and a run in the terminal
status_web                            serves the page of a run

The roles add `stager` and `flusher` by an entry point.
"""
