"""`holdfast run`: a job that is started again by itself after a preemption, and stopped after a bug.

supervisor ── events ─► core ── actions ─► supervisor     core, record, patience, verdict: pure, the clock handed in
    │                                          │
    │  hosts      which hosts are there        │  attempt    one mpirun, ended without leaving a process
    │  tail       the stager's event log       │  output     each process's lines, to a file of its own
    │                                          │  flusher    kept with its ring, and waited for in the end
    └─ rank       around each process of the job: says how it ended, which mpirun does not
"""
