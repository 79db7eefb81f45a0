"""Holdfast in the training loops of others: one module for each framework, none of which is needed by the rest.

epochs         a loader of `ResumableSampler`'s batches with a length, for loops that count epochs
lightning      PyTorch Lightning: a callback, and the environment of the MPI job
transformers   Hugging Face's Trainer: a callback
accelerate     Hugging Face's Accelerate: the state of a plain loop
missing        says what to install

What comes back exactly in each of them, and what does not: docs/frameworks.md.
"""
