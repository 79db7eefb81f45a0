"""Hugging Face's Accelerate."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_side.frameworks.accelerate import prepared
else:
    from holdfast.lazy import lazy_names

    _MODULES = {"trainer_side.frameworks.accelerate": ("prepared",)}
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

__all__ = ["prepared"]
