"""A preemption notice: a training rank's machine will be taken away, or may be.

    watch of a rank ─► NOTICE ─► stager: PreemptionCoordinator ─► SAVE_AT, with the notice in its body ─► every rank

Messages carry a deadline as seconds left, not as a time of day, because the clocks of two machines may differ while a
message takes only milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast.errors import ProtocolError

_CHARACTERS_MAX = 300
_SECONDS_MAX = 1e9
_FACTOR_MAX = 1_000_000
_STEP_MAX = 2**62


class NoticeKind(StrEnum):
    """The machine may be taken away (save now, and more often), or it will be (save before the deadline)."""

    REBALANCE = "rebalance"
    TERMINATE = "terminate"


@dataclass(frozen=True, slots=True)
class Notice:
    """A preemption notice, and its source."""

    kind: NoticeKind  # whether the machine will be taken away, or may be
    deadline_unix: float | None  # when, by this machine's clock; None: not known
    source: str  # the watch that received it: `aws`, `gcp`, `azure`, `sigterm`, `sigusr1`
    said_by: str = ""  # the source's own text, or the address that was polled; for people
    rank: int = -1  # the training rank that received it; -1: not known yet

    def seconds_left(self, now_unix: float | None = None) -> float | None:
        """Seconds until the deadline, below 0 after it; None without a deadline."""
        if self.deadline_unix is None:
            return None
        return self.deadline_unix - (time.time() if now_unix is None else now_unix)

    def sentence(self, now_unix: float | None = None) -> str:
        """Format the notice for a log line: `terminate in 118 s, said by aws (…)`."""
        left = self.seconds_left(now_unix)
        when = "" if left is None else f" in {left:.1f} s" if left >= 0 else f" {-left:.1f} s ago"
        by = f"{self.source} ({self.said_by})" if self.said_by else self.source
        return f"{self.kind}{when}, said by {by}"

    def to_json(self, now_unix: float | None = None) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "seconds_left": self.seconds_left(now_unix),
            "source": self.source[:_CHARACTERS_MAX],
            "said_by": self.said_by[:_CHARACTERS_MAX],
            "rank": self.rank,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], now_unix: float | None = None) -> Notice:
        """Parse the fields of a message. Raises `ProtocolError`: a field is missing or wrong."""
        kind, left = document.get("kind"), document.get("seconds_left")
        texts = document.get("source"), document.get("said_by", "")
        rank = document.get("rank", -1)
        if kind not in list(NoticeKind):
            raise ProtocolError(f"notice: kind is {kind!r:.80}, expected {' or '.join(NoticeKind)}")
        if left is not None and not (type(left) in {int, float} and -_SECONDS_MAX < left < _SECONDS_MAX):
            raise ProtocolError(
                f"notice: seconds_left is {left!r:.80}, expected a number of seconds, or null"
            )
        if not all(isinstance(text, str) and len(text) <= _CHARACTERS_MAX for text in texts):
            raise ProtocolError(f"notice: source and said_by are {texts!r:.200}, expected short texts")
        if not (type(rank) is int and -1 <= rank < _SECONDS_MAX):
            raise ProtocolError(f"notice: rank is {rank!r:.80}, expected a whole number")
        now_unix = time.time() if now_unix is None else now_unix
        deadline_unix = None if left is None else now_unix + left
        return cls(NoticeKind(kind), deadline_unix, _printable(texts[0]), _printable(texts[1]), rank)


@dataclass(frozen=True, slots=True)
class SaveInstruction:
    """The action of all ranks at the step that the stager has appointed; the body of SAVE_AT."""

    save: bool  # whether to take a checkpoint
    reason: str  # why, or why not
    notice: Notice  # with the rank that received it
    factor: int = 1  # checkpoints are this many times as frequent, until step `until_step`; 1: as before
    until_step: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "save": self.save,
            "reason": self.reason,
            "notice": self.notice.to_json(),
            "factor": self.factor,
            "until_step": self.until_step,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SaveInstruction:
        """Parse the fields of a message. Raises `ProtocolError`: a field is missing or wrong."""
        save, reason, notice = document.get("save"), document.get("reason"), document.get("notice")
        factor, until_step = document.get("factor"), document.get("until_step")
        if not (isinstance(save, bool) and isinstance(reason, str) and isinstance(notice, Mapping)):
            raise ProtocolError(f"SAVE_AT: expected save, reason and notice, got {dict(document)!r:.200}")
        if not (type(factor) is int and 1 <= factor <= _FACTOR_MAX):
            raise ProtocolError(f"SAVE_AT: factor is {factor!r:.80}, expected 1 to {_FACTOR_MAX}")
        if not (type(until_step) is int and 0 <= until_step < _STEP_MAX):
            raise ProtocolError(f"SAVE_AT: until_step is {until_step!r:.80}, expected a step")
        return cls(save, reason, Notice.from_json(notice), factor, until_step)


def _printable(text: Any) -> str:
    """Replace control characters, which could steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))
