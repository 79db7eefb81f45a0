"""Source files as trees, each parsed once in a process: several tests look at the same files."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["parsed"]


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, which nobody changes."""
    return ast.parse(path.read_text(encoding="utf-8"))
