"""The tools of the `holdfast` command, one file each. They need neither torch nor MPI.

ls, inspect, verify, pull, assemble   read a store, or mend it: target (`URL[@STEP]`) ─► Catalog ─► output
export, import                        what needs torch comes from the trainers' package (doors)
status                                a run as it goes on
doctor, run, cluster                  the machine, the supervised job, machines on AWS
completion                            for shells
simulate                              what a trace of preemptions would do to a job

output, target, place, partial, claimed, examples       what they share
reference                             makes docs/cli.md of them

The roles add `stager` and `flusher` by an entry point.
"""
