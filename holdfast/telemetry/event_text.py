"""The events that are notices or troubles, and sentences about them, for `holdfast status` and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.telemetry.status_document import TEXT_CHARACTERS_MAX

NOTICES = frozenset({"notice", "emergency", "emergency_staged", "emergency_failed"})
TROUBLES = frozenset(
    {
        *("rank_lost", "rank_silent", "rank_back", "divergence", "flusher_lost", "flusher_replaced"),
        *("flush_failed", "flush_held", "flush_resumed", "bad", "drifted", "doubted", "verify_failed"),
        *("fenced", "ring_lost", "stager_refused", "nonfinite"),
    }
)
# The fields that describe what happened, in the order in which the sentence has them.
_TEXT_FIELDS = (
    *("name", "kind", "choice", "lost_rank", "pid", "reason"),
    *("code", "message", "note", "said_by", "seconds_left"),
)


def event_text(fields: Mapping[str, Any]) -> str:
    """Format an event's fields as one line of bounded length."""
    given = (name for name in _TEXT_FIELDS if fields.get(name) not in (None, ""))
    return truncate("; ".join(_field_text(name, fields[name]) for name in given))


def truncate(text: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """Return `text`, or its beginning and an ellipsis."""
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"


def _field_text(name: str, value: Any) -> str:
    if name == "seconds_left" and isinstance(value, int | float):
        return f"{value:.0f} s left"
    return {"lost_rank": f"rank {value}", "pid": f"process {value}"}.get(name, str(value))
