"""Holdfast in the training loops of frameworks: one module for each framework, independent of the others.

epochs         a loader with a length for `ResumableSampler`'s batches, for training loops that count epochs
lightning      PyTorch Lightning: a callback, and the environment of the job
transformers   Hugging Face's Trainer: a callback
accelerate     Hugging Face's Accelerate: the state of a plain training loop
torchtitan     torchtitan's training loop, or a similar one: a checkpoint manager
trackers       W&B, TensorBoard, MLflow: runs that resume, with marks about checkpoints
missing        the error that says which package to install

docs/frameworks.md says what each framework restores exactly, and what it does not.
"""
