"""Reading an event log (docs/format.md, section 6) that others are still writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_events"]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole by now, in their order; none where there is no file yet."""
    older = sorted(path.parent.glob(f"{path.name}.[0-9]*"))
    whole = [one.read_text().rpartition("\n")[0] for one in (*older, path) if one.exists()]
    return [json.loads(line) for part in whole for line in part.splitlines()]
