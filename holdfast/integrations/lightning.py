"""PyTorch Lightning."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_side.frameworks.lightning import HoldfastCallback, HoldfastEnvironment
else:
    from holdfast.lazy import lazy_names

    _MODULES = {
        "trainer_side.frameworks.lightning": (
            "HoldfastCallback",
            "HoldfastEnvironment",
        )
    }
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

__all__ = ["HoldfastCallback", "HoldfastEnvironment"]
