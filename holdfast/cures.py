"""Where the cure of an error is: one line, for commands, logs and tracebacks. Imports nothing."""

from __future__ import annotations

__all__ = ["help_for"]

_PAGE = "docs/troubleshooting.md"


def help_for(topic: str) -> str:
    """The command that shows causes and cures on any machine, and their place in the pages.

    Args:
        topic: A section of the page: the code of an error (holdfast/errors.py), or `run`.
    """
    return f"holdfast explain {topic} ({_PAGE}#{topic})"
