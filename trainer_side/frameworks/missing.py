"""Parts that all framework modules use: the error for a missing framework, names, random numbers that load twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.errors import ConfigError
from trainer_side.state.rng import RngState

__all__ = ["ReloadableRngState", "missing_framework", "numbered", "reject_taken_names"]


def missing_framework(
    framework: str, error: ImportError, *, module: str = "", extra: str = "frameworks"
) -> ConfigError:
    """Return the error to raise when a framework cannot be imported; the message says what to install.

    `framework`: Its name for pip. `error`: Of the import. `module`: Last part of the name in `holdfast.integrations`;
    empty: the framework's name. `extra`: The extra of holdfast that has it.
    """
    return ConfigError(
        f"holdfast.integrations.{module or framework} needs {framework}, which cannot be imported here: {error}; "
        f"run: pip install {framework} (holdfast's extra [{extra}] has it)"
    )


def numbered(kind: str, values: Iterable[Any]) -> dict[str, Any]:
    """Name the values of a kind: a single one `optimizer`; several `optimizer0`, `optimizer1` and so on."""
    found = [*values]
    return {kind if len(found) == 1 else f"{kind}{number}": one for number, one in enumerate(found)}


def reject_taken_names(own: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `HoldfastCallback(state=…)` has a name that the callback itself uses."""
    if twice := own.keys() & more.keys():
        raise ConfigError(
            f"HoldfastCallback(state=…): the callback itself saves {', '.join(sorted(twice))}; choose another name"
        )


class ReloadableRngState(RngState):
    """An `RngState` that can load the same saved state a second time."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set all generators to the states in `saved`, and keep `saved` for `reload`."""
        super().load_state_dict(saved)
        self._saved = saved

    def reload(self) -> None:
        """Set all generators to the states of `load_state_dict` again. Does nothing on a new run."""
        if self._saved is not None:
            super().load_state_dict(self._saved)
            self._saved = None
