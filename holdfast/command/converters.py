"""Export and import need torch, so the trainers' package does the work: found by entry point, loaded on use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from holdfast.errors import ConfigError
from holdfast.extras import install_line

if TYPE_CHECKING:
    from holdfast.checkpoints.image_writing import Image
    from holdfast.image.checkpoint_id import CheckpointId


_GROUP = "holdfast.converters"


class Exported(NamedTuple):
    """An export that was written.

    Attributes:
        tied: Tied tensors: name to the name of the tensor that it shares memory with.
    """

    nbytes: int
    tensors: int
    tied: Mapping[str, str]


class ImportSource(Protocol):
    """A file or folder of another tool. It was read, and can be published as a checkpoint."""

    @property
    def kind(self) -> str:
        """`torch`, `safetensors` or `dcp`."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The top-level names of the state."""
        ...

    @property
    def tensors(self) -> int: ...

    @property
    def image_bytes(self) -> int:
        """Size of the checkpoint file."""
        ...

    def image(self, key: CheckpointId) -> Image: ...


def converter(name: str) -> Any:
    """Load the exporter or importer that is registered under this name.

    Raises:
        ConfigError: It cannot be loaded here; the message says what to install.
    """
    point = next(iter(entry_points(group=_GROUP, name=name)), None)
    if point is None:
        raise ConfigError(
            f"this installation of holdfast has no {name!r}; install holdfast again, as you have installed it"
        )
    try:
        return point.load()
    except ImportError as error:
        missing = error.name or str(error)
        raise ConfigError(f"{name}: {missing} is not installed; run: {install_line('trainer')}") from error
