"""Interface of export, import and diff. They need torch, so trainer_side implements them, loaded by entry point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from holdfast.checkpoints.image_publishing import Image
from holdfast.errors import ConfigError
from holdfast.extras import install_line

if TYPE_CHECKING:
    from holdfast.image.manifest import Manifest
    from holdfast.store.base import Store


_GROUP = "holdfast.converters"


class ExportResult(NamedTuple):
    """A finished export."""

    nbytes: int
    tensors: int
    tied: Mapping[str, str]  # name → name of the tensor that it shares memory with


class ImportSource(Image, Protocol):
    """A file or folder of another tool, opened as the image of a checkpoint that can be published."""

    @property
    def kind(self) -> str:
        """`torch`, `safetensors` or `dcp`."""

    @property
    def names(self) -> Sequence[str]:
        """The top-level names of the state."""

    @property
    def tensors(self) -> int: ...


class ComparedFile(NamedTuple):
    """One side of a comparison: a file of torch.save or safetensors, or a checkpoint in the store of a run."""

    path: Path | None = None
    store: Store | None = None
    manifest: Manifest | None = None


class TensorDifference(NamedTuple):
    """Two different tensors at one path."""

    path: str
    dtypes: tuple[str, str]  # of each side
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    elements: int | None = None  # of each side; None if the shapes differ
    differing: int | None = None  # elements with different bits, or values if the dtypes differ
    max_abs: float | None = None  # largest difference between two finite elements
    mean_abs: float | None = None  # mean difference of all finite elements
    max_relative: float | None = None  # largest difference of two elements, relative to the larger of them
    relative: float | None = None  # norm of the difference of finite elements, relative to the larger norm
    nonfinite: tuple[int, int] | None = None  # NaN and infinite elements of each side


class StateComparison(NamedTuple):
    """The differences between two states."""

    only_a: Sequence[str]  # paths in the first state only, of tensors and of other values
    only_b: Sequence[str]
    tensors: Sequence[TensorDifference]  # different dtypes and shapes first, then by the relative difference
    values: Sequence[tuple[str, str, str]]  # path and both values, for values that are not tensors
    equal_tensors: int  # number of tensors with equal bits
    unread: int  # number of those that were compared only by CRC-32
    equal_values: int

    @property
    def is_equal(self) -> bool:
        return not (self.only_a or self.only_b or self.tensors or self.values)


def load_converter(name: str) -> Any:
    """Load the converter that is registered under this name. Raises `ConfigError`: says what to install."""
    point = next(iter(entry_points(group=_GROUP, name=name)), None)
    if point is None:
        raise ConfigError(
            f"this installation of holdfast has no {name!r}; install holdfast again, in the same way as before"
        )
    try:
        return point.load()
    except ImportError as error:
        missing = error.name or str(error)
        raise ConfigError(f"{name}: {missing} is not installed; run: {install_line('trainer')}") from error
