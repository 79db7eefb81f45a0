"""Why a step is skipped: a cause, under which it is counted, and a sentence for people.

The code that declines a step states both. The causes are few; they label the statistics of a rank and `/metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from holdfast.errors import HoldfastError

OTHER = "other"
STATES_DIFFER = "the ranks' states differ"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a step is skipped."""

    cause: str
    text: str

    def __str__(self) -> str:
        return self.text

    def with_rank(self, rank: int) -> Reason:
        """Return this reason as other ranks see it, with the rank in the text."""
        return Reason(self.cause, f"rank {rank}: {self.text}")

    @classmethod
    def from_error(cls, error: HoldfastError) -> Self:
        """Return the reason for a step that failed with this error."""
        return cls(_cause_of_code(error.code), str(error))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Parse the stager's message DECLINED or FAILED (docs/wire.md)."""
        return cls(cause_from(body), str(body.get("reason") or body.get("message") or ""))

    @classmethod
    def from_decline(cls, text: str) -> Self:
        """Parse a rank's message DECLINE (docs/wire.md): the cause, a colon, a sentence."""
        cause, colon, _ = text.partition(": ")
        return cls(cause if colon and cause in _DECLINE_CAUSES else OTHER, text)


class DeclineCause(StrEnum):
    """Why a rank, one of its local tiers or the stager skips a step. A value is the label of a metric."""

    BUSY = "busy"
    LATE = "late"
    NOT_NEW = "not new"
    NO_MEMORY = "no memory"
    OUTGROWN = "outgrown"
    COPY_FAILED = "copy failed"
    COPY_STUCK = "copy stuck"
    TORN = "torn"
    STAGER_LOST = "stager lost"
    UNKNOWN = "unknown"
    # by the stager
    STOPPING = "stager stopping"
    # by a local tier
    FAILED = "failed"
    HANGS = "hangs"
    LOST = "lost"
    SUPERSEDED = "superseded"
    VOID = "void"

    def because(self, sentence: object) -> Reason:
        """Return this cause with a sentence; the text begins with the cause."""
        return Reason(self.value, f"{self.value}: {sentence}")


_DECLINE_CAUSES = frozenset(DeclineCause)
_CAUSES_OF_CODES = {
    "busy": "no room at the stager",
    "peer_lost": "a process was lost or late",
    "state": STATES_DIFFER,
    "store": "store",
    "damage": "damage",
}


def cause_from(fields: Mapping[str, Any]) -> str:
    """Return the cause in the fields of an event or of a stager's message: `cause`, or by the error's `code`."""
    return str(fields.get("cause") or "") or _cause_of_code(str(fields.get("code") or ""))


def _cause_of_code(code: str) -> str:
    return _CAUSES_OF_CODES.get(code, code) or OTHER
