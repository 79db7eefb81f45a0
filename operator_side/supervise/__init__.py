"""`holdfast run`: restarts a job after a preemption, and stops it after a bug.

supervisor ── events ─► core ── actions ─► supervisor ─► job_processes ─► mpirun ─► rank ─► a process of the job

core, record, limits, verdict, suspicion    decisions, all pure: the time is passed in
supervisor, supervisor_messages           the loop around the core; its events and actions
hosts, flusher, job_processes, job_output    the parts that the loop uses
torchrun_job, kept_stager                 a job under torchrun, which restarts the ranks; the standing stager beside it
tied                                      starts a command that dies with its parent
rank                                      wraps each process of a job: reports how it ended, which mpirun does not
wrapped_rank, exit_codes                  `holdfast rank`, for other engines: what one machine sees, as an exit code
"""
