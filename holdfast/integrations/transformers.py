"""Hugging Face's Trainer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_side.frameworks.transformers import HoldfastCallback
else:
    from holdfast.lazy import lazy_names

    _MODULES = {"trainer_side.frameworks.transformers": ("HoldfastCallback",)}
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

__all__ = ["HoldfastCallback"]
