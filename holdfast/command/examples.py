"""The examples at the end of a command's help: `@click.command(epilog=examples(…))`. Imports nothing."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """Format the examples, one line each, so that click does not wrap them."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
