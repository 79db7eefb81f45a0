"""The failures of a run so far, and the time over which they were counted, on the way from flusher to ranks.

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
    """The interrupted attempts of a run, and the seconds of all attempts, each from its first checkpoint."""

    failures: int = 0
    seconds: float = 0.0

    def with_attempt(self, seconds: float, *, failed: bool) -> FailureCount:
        """Return the count with one more attempt."""
        return FailureCount(self.failures + failed, self.seconds + max(0.0, seconds))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> FailureCount:
        """Read a count; zero if a peer of an older version sends none. Raises `ProtocolError`."""
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


NO_FAILURES = FailureCount()
