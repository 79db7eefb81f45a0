"""Source files as trees, parsed once per process: several tests read the same files."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["parsed"]


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file; callers must not change it."""
    return ast.parse(path.read_text(encoding="utf-8"))
