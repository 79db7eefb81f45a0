"""What is said when a framework is not installed."""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from trainer_side.state.rng import RngState

__all__ = ["RngAgain", "missing"]


def missing(framework: str, error: ImportError) -> ConfigError:
    """The error to raise in place of `error`.

    Args:
        framework: Its name, as pip knows it, and the last part of the name of the module that needs it.
        error: What the import said.
    """
    return ConfigError(
        f"trainer_side.frameworks.{framework} needs {framework}, which cannot be imported here: {error}; "
        f"pip install 'holdfast[frameworks]', or {framework} alone"
    )


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
