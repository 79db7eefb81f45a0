"""A pace is the interval at which all ranks save; these are its messages.

    rank 0 ── WISH: PaceRequest ──► stager/interval_agreement.py ── SAVE_EVERY: Pace ──► every rank
                                                                 ◄───────── HERE ──────────┘

Bodies are untrusted input: a wrong field is a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import ProtocolError

EVERY_MAX = 1_000_000
_STEP_MAX = 2**61  # a step and an interval after it still fit into a message
_CHARACTERS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Pace:
    """All ranks save at step `first`, and at every `every`-th step after it."""

    first: int
    every: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Pace:
        """Read the fields. Raises `ProtocolError`."""
        first = _whole_number("SAVE_EVERY", document, "first", 0, _STEP_MAX)
        return cls(first, _whole_number("SAVE_EVERY", document, "every", 1, EVERY_MAX))


@dataclass(frozen=True, slots=True)
class PaceRequest:
    """The interval that rank 0 asks for. `after`: the last step that was due; the next is `every` steps later."""

    every: int
    after: int
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"every": self.every, "after": self.after, "why": self.why[:_CHARACTERS_MAX]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PaceRequest:
        """Read the fields. Raises `ProtocolError`."""
        every = _whole_number("WISH", document, "every", 1, EVERY_MAX)
        after = _whole_number("WISH", document, "after", -1, _STEP_MAX)
        why = document.get("why")
        if not (isinstance(why, str) and len(why) <= _CHARACTERS_MAX):
            raise ProtocolError(
                f"WISH: why is {why!r:.80}, expected a text of at most {_CHARACTERS_MAX} characters"
            )
        return cls(every, after, "".join(letter if letter.isprintable() else "?" for letter in why))


def _whole_number(kind: str, document: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = document.get(name)
    if not (type(value) is int and least <= value <= most):
        raise ProtocolError(
            f"{kind}: {name} is {value!r:.80}, expected a whole number from {least} to {most}"
        )
    return value
