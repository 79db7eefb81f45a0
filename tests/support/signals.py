"""Signals for children of tests, whatever the tests were started with."""

from __future__ import annotations

__all__ = ["INTERRUPTIBLE"]

# Before a command: SIGINT interrupts it, also where the tests ignore it (`nohup make test &` in a script).
INTERRUPTIBLE = ("env", "--default-signal=INT")
