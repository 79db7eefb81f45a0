"""One fact about checkpoints, as a tracker shows it: a number at a training step."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "holdfast"


@dataclass(frozen=True)
class Mark:
    """One point of a chart about checkpoints.

    Attributes:
        name: The chart: `stall_seconds`, `staged_seconds`, `durable_seconds`, `kept_seconds`, `attempt`, `lost_steps`.
        step: The training step, which may be long past.
        value: The number.
        text: For people; empty if the number says all.
    """

    name: str
    step: int
    value: float
    text: str = ""

    @property
    def title(self) -> str:
        """Name of the chart among those of the script."""
        return f"{PREFIX}/{self.name}"
