"""Experiment trackers: the run in W&B, TensorBoard or MLflow resumes where the training resumes.

    restore() ─► Checkpointer.track ─► StartPoint ─► the tracker's run resumes; each later checkpoint has its id
    events of this rank (save, staged, durable, …) ─► marking, on its own thread ─► Mark ─► each Tracker

tracker              the interface of a tracker, its null tracker, where training resumes, one fact about checkpoints
marking              collects the marks, and sends them
wandb_tracker        W&B, and the steps that an offline run of it has logged
tensorboard_tracker  TensorBoard
mlflow_tracker       MLflow

A tracker's library is imported only when a script asks for it. docs/trackers.md is the page for users.
"""
