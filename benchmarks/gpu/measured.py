"""The figures of a phase so far, in a file that is whole at every moment: a run that is cut off keeps them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FULL", "QUICK", "Measured", "Sizes", "write_json"]


@dataclass(frozen=True)
class Sizes:
    """How large everything is; a toy size rehearses the code and measures nothing that counts.

    Attributes:
        rounds: Of each measurement of a copy.
        copy_bytes: Of one bare copy.
        large_bytes, small_bytes: Of the states of 30 large and of many small tensors.
        small_tensors: How many.
        layers, width, vocabulary, context, batch: Of the model that trains.
        steps: Of one run; half of them in the warm-up.
        every: Steps from one save to the next.
    """

    rounds: int
    copy_bytes: int
    large_bytes: int
    small_bytes: int
    small_tensors: int
    layers: int
    width: int
    vocabulary: int
    context: int
    batch: int
    steps: int
    every: int


# The model has 0.35 G parameters: with fp32 AdamW a state of 4.2 GB.
FULL = Sizes(
    rounds=10,
    copy_bytes=1 << 30,
    large_bytes=4 << 30,
    small_bytes=1 << 30,
    small_tensors=10_000,
    layers=24,
    width=1024,
    vocabulary=50_304,
    context=512,
    batch=8,
    steps=60,
    every=10,
)
QUICK = Sizes(
    rounds=2,
    copy_bytes=1 << 20,
    large_bytes=2 << 20,
    small_bytes=1 << 18,
    small_tensors=200,
    layers=1,
    width=16,
    vocabulary=64,
    context=8,
    batch=2,
    steps=6,
    every=3,
)


class Measured:
    """The figures of one phase.

    Args:
        path: Where they are written, at each new one.
        phase: Its name.
        seconds: How long the phase may take.
        folder: For what it writes beside its figures; empty.
    """

    def __init__(self, path: Path, phase: str, seconds: float, folder: Path) -> None:
        self._path, self.phase, self._ends = path, phase, time.monotonic() + seconds
        self.folder = folder
        self._figures: dict[str, Any] = {}
        self._left_out: dict[str, str] = {}
        self._write()

    def put(self, **figures: Any) -> None:
        """Add figures; one of the same name is replaced."""
        self._figures |= figures
        self._write()

    def leave_out(self, what: str, reason: str) -> None:
        """Say that something of the phase was not measured."""
        self._left_out[what] = reason
        self._write()

    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def _write(self) -> None:
        document = {"phase": self.phase, "status": "running", "figures": self._figures}
        write_json(self._path, document | ({"left_out": self._left_out} if self._left_out else {}))


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file as a whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
