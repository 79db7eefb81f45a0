"""The failures that a run has seen, and the time in which it would have seen one; on its way to whoever decides.

claims in the store ─► flusher ── welcome ──► stager ── WELCOME ──► every rank      holdfast/policy/hazard.py
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import ProtocolError
from holdfast.wire.frames import WHOLE_MAX

_SECONDS_MAX = 1e11  # three thousand years


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The attempts of a run that were interrupted, and the seconds of all, from the first checkpoint of each."""

    failures: int = 0
    seconds: float = 0.0

    def plus(self, seconds: float, *, failed: bool) -> FailureCount:
        """With one more attempt."""
        return FailureCount(self.failures + failed, self.seconds + max(0.0, seconds))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> FailureCount:
        """Read one; nothing was seen where a peer of an older version says nothing. Raises `ProtocolError`."""
        if document is None:
            return cls()
        found: dict[str, Any] = document if isinstance(document, dict) else {}
        failures: Any = found.get("failures")
        seconds: Any = found.get("seconds")
        if not (type(failures) is int and 0 <= failures < WHOLE_MAX) or not (
            type(seconds) in {int, float} and 0 <= seconds < _SECONDS_MAX  # neither NaN nor infinite
        ):
            raise ProtocolError(f"failures seen: expected two numbers of at least 0, got {document!r:.80}")
        return cls(failures, float(seconds))


NONE_SEEN = FailureCount()
