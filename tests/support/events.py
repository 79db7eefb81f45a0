"""Reads an event log (docs/format.md, section 6) while other processes write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_events"]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete lines so far, in order; none if there is no file yet."""
    older = sorted(path.parent.glob(f"{path.name}.[0-9]*"))
    whole = [one.read_text().rpartition("\n")[0] for one in (*older, path) if one.exists()]
    return [json.loads(line) for part in whole for line in part.splitlines()]
