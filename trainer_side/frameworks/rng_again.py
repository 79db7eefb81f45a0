"""Random numbers that are brought back a second time: frameworks draw some between a restore and the first step."""

from __future__ import annotations

from typing import Any

from trainer_side.state.rng import RngState

__all__ = ["RngAgain"]


class RngAgain(RngState):
    """As `RngState`, and remembers what it was told."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; and once more with `again`."""
        super().load_state_dict(saved)
        self._saved = saved

    def again(self) -> None:
        """As `load_state_dict` was told, once; nothing on a new run."""
        if self._saved is not None:
            super().load_state_dict(self._saved)
            self._saved = None
