"""Signals for children of tests, whatever signals the test runner itself ignores."""

from __future__ import annotations

__all__ = ["INTERRUPTIBLE"]

# Prefix of a command: SIGINT interrupts it, even if the tests ignore SIGINT (`nohup make test &` in a script).
INTERRUPTIBLE = ("env", "--default-signal=INT")
