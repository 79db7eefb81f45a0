"""Signals for children of tests, whatever the tests were started with."""

from __future__ import annotations

import signal

__all__ = ["interruptible"]


def interruptible() -> None:
    """A `preexec_fn`: SIGINT interrupts the child, also where the tests ignore it (`nohup make test &` in a script)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
