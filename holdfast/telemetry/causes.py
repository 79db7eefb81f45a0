"""Why a step is not taken: the cause, under which it is counted, and the sentence for people.

The part that declines a step states both. The causes are few; they label the books of a rank and `/metrics`.
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
    """Why a step is not taken."""

    cause: str
    text: str

    def __str__(self) -> str:
        return self.text

    def of_rank(self, rank: int) -> Reason:
        """The same, as other ranks are told it."""
        return Reason(self.cause, f"rank {rank}: {self.text}")

    @classmethod
    def of_error(cls, error: HoldfastError) -> Self:
        """An error that leaves no checkpoint of the step."""
        return cls(_cause_of_code(error.code), str(error))

    @classmethod
    def of_body(cls, body: Mapping[str, Any]) -> Self:
        """As the stager states it in DECLINED and FAILED (docs/wire.md)."""
        return cls(cause_in(body), str(body.get("reason") or body.get("message") or ""))

    @classmethod
    def of_decline(cls, text: str) -> Self:
        """As a rank states it in DECLINE (docs/wire.md): the cause, a colon, a sentence."""
        cause, colon, _ = text.partition(": ")
        return cls(cause if colon and cause in _DECLINE_CAUSES else OTHER, text)


class DeclineCause(StrEnum):
    """Why a rank, one of its local tiers or the stager does not take a step. A value is the label of a metric."""

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
    # of the stager
    STOPPING = "stager stopping"
    # of a local tier
    FAILED = "failed"
    HANGS = "hangs"
    LOST = "lost"
    SUPERSEDED = "superseded"
    VOID = "void"

    def because(self, sentence: object) -> Reason:
        """This cause with a sentence; for people the cause stands before it."""
        return Reason(self.value, f"{self.value}: {sentence}")


_DECLINE_CAUSES = frozenset(DeclineCause)
_CAUSES_OF_CODES = {
    "busy": "no room at the stager",
    "peer_lost": "a process was lost or late",
    "state": STATES_DIFFER,
    "store": "store",
    "damage": "damage",
}


def cause_in(fields: Mapping[str, Any]) -> str:
    """The cause that an event, or a message of the stager, states: as such, or as the code of an error."""
    return str(fields.get("cause") or "") or _cause_of_code(str(fields.get("code") or ""))


def _cause_of_code(code: str) -> str:
    return _CAUSES_OF_CODES.get(code, code) or OTHER
