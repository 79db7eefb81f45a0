"""Holdfast in the training loops of frameworks: one module for each framework, independent of the others.

docs/frameworks.md says what each framework restores exactly, and what it does not.
"""
