"""Experiment trackers: the run of this training in W&B, TensorBoard or MLflow goes on where the training does.

    restore() ─► Checkpointer.track ─► StartPoint ─► the tracker's run goes on; its id is in each later checkpoint
    events of this rank (save, staged, durable, …) ─► marking, a thread of its own ─► Mark ─► each Tracker

tracker              the interface of a tracker, and the one of ranks that have none
start_point          where training goes on
mark                 one fact about checkpoints, at a training step
marking              collects the marks, and sends them
wandb_tracker        W&B.   logged_steps: the steps that an offline run has logged
tensorboard_tracker  TensorBoard
mlflow_tracker       MLflow

No tracker is imported before a script asks for it. docs/trackers.md is the page for users.
"""
