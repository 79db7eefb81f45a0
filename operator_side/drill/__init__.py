"""`holdfast drill`: kills a user's own script under `holdfast run` at random points, and checks how it resumes.

    run_drill ── reference run ──► kill_plan (pure): which kill, after which step
      │  └─ drilled run: job ── events, status, diary of the ranks ──► kill_plan ── Strike, GiveNotice ──► job
      └─ findings (pure): resumed, lost, recovery, samples ◄── events, status, diary      compare ◄── both stores

values   what a portable file holds beside its tensors, read without torch and without running anything
"""
