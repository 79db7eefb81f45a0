"""The tools of the `holdfast` command, one file each. They need neither torch nor MPI.

ls, inspect, verify, pull, assemble   read a store, or mend it: target (`URL[@STEP]`) ─► Catalog ─► output
doctor, run, cluster                  the machine, the supervised job, machines on AWS
simulate                              what a trace of preemptions would do to a job

The roles add `stager` and `flusher` by an entry point.
"""
