"""`holdfast run`: restarts a job after a preemption, and stops it after a bug.

supervisor ── events ─► core ── actions ─► supervisor     core, record, limits, verdict: pure, the time is passed in
    │                                          │
    │  hosts          which hosts are usable   │  job_processes  one attempt at a time: mpirun and its processes
    │  job_output     reports and log files    │  attempt        one mpirun, ended without leaving a process
    │                                          │  flusher        keeps ring and flusher, waits for them at the end
    └─ rank           wraps each process of the job: reports how it ended, which mpirun does not

    torchrun_job ─► kept_stager, `holdfast rank` around torchrun     the same with torchrun, which restarts the ranks

`holdfast rank`, for other engines: wrapped_rank ── what one machine sees ─► exit_codes ─► verdict ─► an exit code

core, record, limits, verdict, suspicion, resumption    decisions, all pure
supervisor, supervisor_messages                  the loop around the core; its events and actions
hosts, flusher, job_processes, job_output, attempt    the parts that the loop uses
torchrun_job, kept_stager                        a job under torchrun, and the standing stager beside it
tied                                             starts a command that dies with its parent
rank                                             wraps each process of a job: reports how it ended
wrapped_rank, exit_codes                         `holdfast rank`
"""
