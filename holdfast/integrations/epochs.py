"""Training loops that count epochs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_side.frameworks.epochs import EpochLoader
else:
    from holdfast.lazy import lazy_names

    _MODULES = {"trainer_side.frameworks.epochs": ("EpochLoader",)}
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

__all__ = ["EpochLoader"]
