"""Parts that all framework modules use: the error for a missing framework, and random numbers that load twice."""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from trainer_side.state.rng import RngState

__all__ = ["RngAgain", "missing"]


def missing(
    framework: str, error: ImportError, *, module: str = "", extra: str = "frameworks"
) -> ConfigError:
    """The error to raise when a framework cannot be imported; it says what to install.

    Args:
        framework: Name of the framework for pip.
        error: The error of the import.
        module: Last part of the name of the holdfast module that needs it; empty: the framework's name.
        extra: The extra of holdfast that has it.
    """
    return ConfigError(
        f"holdfast.integrations.{module or framework} needs {framework}, which cannot be imported here: {error}; "
        f"run: pip install {framework} (holdfast's extra [{extra}] has it)"
    )


class RngAgain(RngState):
    """An `RngState` that can load the same saved state a second time."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set all generators to the states in `saved`, and keep `saved` for `again`."""
        super().load_state_dict(saved)
        self._saved = saved

    def again(self) -> None:
        """Set all generators once more to the states of `load_state_dict`. Does nothing on a new run."""
        if self._saved is not None:
            super().load_state_dict(self._saved)
            self._saved = None
