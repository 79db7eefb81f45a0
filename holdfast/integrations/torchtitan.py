"""torchtitan's training loop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_side.frameworks.torchtitan import HoldfastCheckpointManager
else:
    from holdfast.lazy import lazy_names

    _MODULES = {"trainer_side.frameworks.torchtitan": ("HoldfastCheckpointManager",)}
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

__all__ = ["HoldfastCheckpointManager"]
