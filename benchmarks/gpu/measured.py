"""Keeps a phase's figures so far in a file that is complete at every moment, so that an aborted run has them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["FULL", "QUICK", "Measured", "ModelSizes", "Sizes", "write_json"]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a transformer trained on `batch` sequences of `context` tokens in each step."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of models, states and windows; toy sizes only rehearse the code.

    Attributes:
        large_bytes, small_bytes: Bytes of the states of 30 large and of many small tensors.
        large, small, tiny: Trained models. Every peer saves `small` and `large`.
        window_steps_min: Fewest steps in a window.
    """

    rounds: int
    copy_bytes: int
    large_bytes: int
    small_bytes: int
    small_tensors: int
    large: ModelSizes
    small: ModelSizes
    tiny: ModelSizes
    steps: int
    every: int
    window_steps_min: int


_LARGE = ModelSizes(layers=16, width=2048, heads=16, vocabulary=50_304, context=512, batch=8)
_QUICK = ModelSizes(layers=1, width=32, heads=8, vocabulary=64, context=8, batch=2)
# With fp32 AdamW the states have 12.1, 4.0 and 0.2 GB.
FULL = Sizes(
    rounds=6,
    copy_bytes=1 << 30,
    large_bytes=2 << 30,
    small_bytes=1 << 30,
    small_tensors=10_000,
    large=_LARGE,
    small=replace(_LARGE, layers=18, width=1024, heads=8),
    tiny=replace(_LARGE, layers=4, width=512, heads=8, vocabulary=1024),
    steps=100,
    every=10,
    window_steps_min=6,
)
QUICK = Sizes(
    rounds=2,
    copy_bytes=1 << 20,
    large_bytes=2 << 20,
    small_bytes=1 << 18,
    small_tensors=200,
    large=_QUICK,
    small=replace(_QUICK, width=16),
    tiny=replace(_QUICK, width=16),
    steps=6,
    every=3,
    window_steps_min=3,
)


class Measured:
    """The figures of one phase.

    Args:
        path: File that is rewritten at each new figure.
        folder: Empty folder for the phase's other files.
    """

    def __init__(self, path: Path, phase: str, seconds: float, folder: Path) -> None:
        self._path, self.phase, self._ends = path, phase, time.monotonic() + seconds
        self.folder = folder
        self._figures: dict[str, Any] = {}
        self._left_out: dict[str, str] = {}
        self._write()

    def put(self, **figures: Any) -> None:
        """Add figures, replacing those of the same name."""
        self._figures |= figures
        self._write()

    def leave_out(self, what: str, reason: str) -> None:
        """Record that a part of the phase was not measured, and why."""
        self._left_out[what] = reason
        self._write()

    def beside(self, name: str) -> Path:
        """Return a path beside the figures, for a log."""
        return self._path.with_name(f"{self.phase}-{name}")

    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def _write(self) -> None:
        document = {"phase": self.phase, "status": "running", "figures": self._figures}
        write_json(self._path, document | ({"left_out": self._left_out} if self._left_out else {}))


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
