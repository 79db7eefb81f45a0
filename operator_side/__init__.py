"""The tools that a person runs: `holdfast run`, `cluster`, `drill`, `doctor`, `report`, `status` and the rest.

Each command is a file in commands/. The work behind a command has a room: supervise/ (`holdfast run`),
cluster/, drill/, doctor/, report/, status/, simulate/ (also `tune`); `holdfast init` has onboarding.py.
"""
