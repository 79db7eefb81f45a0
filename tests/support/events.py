"""Reading an event log (docs/format.md, section 6) that others are still writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_events"]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole by now, in their order; none where there is no file yet."""
    written = path.read_text() if path.exists() else ""
    whole, _, _ = written.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
