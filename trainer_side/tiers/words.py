"""What the training ranks say to each other of their local tiers. One word is one message: a line of JSON, then bytes.

to rank 0     SEALED, SKIPPED     tier, attempt, step; the layout's digest, or why
              PROPOSE             payload: a `Proposal`, as the stager would get it
              READY               this rank has prepared for the first layout; or code and message of an error
              NOTICE, AT          payload: as the stager would get it; text: this rank, for people
              BYE                 nothing more comes
to all        COMPLETE, VOID      tier, attempt, step
              GO                  every rank is ready
              AGREED, REFUSED     payload: an `Agreement`; or code and message of an error
              ROOM                bytes that rank 0's pickle gets from now on
              SAVE_AT             payload: as the stager would say it
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, NamedTuple

from holdfast.errors import ProtocolError

_WHOLE_MAX = 2**62
_TEXT_MAX = 4000


class Said(StrEnum):
    """Kinds of word."""

    SEALED = "sealed"
    SKIPPED = "skipped"
    PROPOSE = "propose"
    READY = "ready"
    GO = "go"
    BYE = "bye"
    COMPLETE = "complete"
    VOID = "void"
    AGREED = "agreed"
    REFUSED = "refused"
    ROOM = "room"
    NOTICE = "notice"
    AT = "at"
    SAVE_AT = "save at"


class Word(NamedTuple):
    """One message. What a kind has no use for is empty."""

    said: Said
    tier: int = 0
    attempt: int = 0
    step: int = 0
    text: str = ""
    code: str = ""
    nbytes: int = 0
    payload: bytes = b""

    @property
    def order(self) -> tuple[int, int]:
        """Which checkpoint."""
        return (self.attempt, self.step)

    def to_bytes(self) -> bytes:
        """As it is sent."""
        head: dict[str, Any] = {
            name: value for name, value in self._asdict().items() if value and name != "payload"
        }
        head["text"] = self.text[:_TEXT_MAX]
        return json.dumps(head).encode() + b"\n" + self.payload

    @classmethod
    def from_bytes(cls, message: bytes, *, rank: int) -> Word:
        """Read one from rank `rank`.

        Raises:
            ProtocolError: It is none.
        """
        line, _, payload = message.partition(b"\n")
        try:
            head = json.loads(line)
            word = cls(Said(head.pop("said")), payload=payload, **head)
            wholes: list[Any] = [word.tier, word.attempt, word.step, word.nbytes]
            texts: list[Any] = [word.text, word.code]
            if not all(type(one) is int and 0 <= one < _WHOLE_MAX for one in wholes):
                raise ValueError("a number is out of range")
            if not all(type(one) is str for one in texts):
                raise ValueError("a text is none")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(
                f"rank {rank} said {message[:80]!r}, which is no word of ours: {error}"
            ) from error
        return word
