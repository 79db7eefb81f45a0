"""Experiment trackers: the run in W&B, TensorBoard or MLflow resumes where the training resumes.

    restore() ─► Checkpointer.track ─► StartPoint ─► the tracker's run resumes; each later checkpoint has its id
    events of this rank (save, staged, durable, …) ─► marking, on its own thread ─► Mark ─► each Tracker

A tracker's library is imported only when a script asks for it. docs/trackers.md is the page for users.
"""
