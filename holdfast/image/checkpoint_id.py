"""The name of one checkpoint within its run: (attempt, step).

Not a clock time, because clocks jump; with the attempt, because a restart from an older step repeats step numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Self

_LABEL = re.compile(r"(\d{1,18})-a0*([1-9]\d{0,17})", re.ASCII)


class CheckpointId(NamedTuple):
    """Names one checkpoint; older ones compare lower."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt})"

    @property
    def label(self) -> str:
        """`STEP-aATTEMPT`, such as `1200-a3`: the one-word form in settings and reports."""
        return f"{self.step}-a{self.attempt}"

    @classmethod
    def from_label(cls, text: str) -> Self:
        """Parse a `label`. ValueError: the text is not one."""
        match = _LABEL.fullmatch(text)
        if match is None:
            raise ValueError(f"a checkpoint as STEP-aATTEMPT, such as 1200-a3, expected; got {text!r}")
        return cls(attempt=int(match[2]), step=int(match[1]))

    def is_set_aside(self, others: Iterable[CheckpointId]) -> bool:
        """Whether this is one of `others`, or was saved after one of them by the same attempt."""
        return any(other.attempt == self.attempt and other.step <= self.step for other in others)
