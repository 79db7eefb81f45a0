"""`holdfast drill`: kills a user's own script under `holdfast run` at random points, and checks how it resumes.

    play ── reference run ──► plan (pure): which kill, after which step
      │  └─ drilled run: job ── diary, events, status ──► sequence (pure) ── strike, tell ──► job: SIGKILL, SIGTERM
      └─ findings (pure): resumed, lost, recovery, samples ◄── diary, events, status      compare ◄── both stores

diary    what ranks of a drill write down, step by step
values   what a portable file holds beside its tensors, read without torch and without running anything
"""
