"""What is said when a framework is not installed."""

from __future__ import annotations

from holdfast.errors import ConfigError

__all__ = ["missing"]


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
