"""The examples at the end of a command's help: `@click.command(epilog=examples(…))`. Imports nothing."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """The last part of a command's help, one line for each; click does not wrap it."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
