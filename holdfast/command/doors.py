"""What `holdfast export` and `holdfast import` need torch for: found by an entry point, loaded when it is used.

The commands themselves are here, so that their help needs no torch; the trainers' package brings the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.checkpoints.assembly import Image
    from holdfast.image.manifest import Key


_GROUP = "holdfast.doors"


class Exported(NamedTuple):
    """What was written.

    Attributes:
        nbytes: All of it.
        tensors: How many.
        tied: Tensors that are another one: name to name.
    """

    nbytes: int
    tensors: int
    tied: Mapping[str, str]


class Foreign(Protocol):
    """A file or folder of another tool, ready to be published: it is known that it can be saved, and loaded again."""

    @property
    def kind(self) -> str:
        """What it is: `torch`, `safetensors` or `dcp`."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The names at the top of the state."""
        ...

    @property
    def tensors(self) -> int:
        """How many there are."""
        ...

    @property
    def image_bytes(self) -> int:
        """Size of the checkpoint's file."""
        ...

    def image(self, key: Key) -> Image:
        """The image to publish as this checkpoint."""
        ...


def door(name: str) -> Any:
    """What is registered under this name.

    Raises:
        ConfigError: It cannot be loaded here; says what to install.
    """
    point = next(iter(entry_points(group=_GROUP, name=name)), None)
    if point is None:
        raise ConfigError(
            f"this installation of holdfast has no {name!r}; install it again, as holdfast[trainer]"
        )
    try:
        return point.load()
    except ImportError as error:
        missing = error.name or str(error)
        raise ConfigError(
            f"{name}: {missing} is not installed; run: pip install 'holdfast[trainer]'"
        ) from error
