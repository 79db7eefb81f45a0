"""The facts about an image that both a manifest and a layout state, so that restore reads either by the same code.

Manifest    of a portable file in the store: every entry, with its CRC-32
Layout      of the slices that local tiers keep: the entries whose CRC-32 nobody knows yet
Ends        the image's first and last bytes, as two entries: what the tree is made of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.errors import DamageError

# A zip reader looks for the end of the directory in this many bytes at the end of the file.
_TAIL_BYTES = 4096
_ENDS_BYTES_MAX = 1 << 30  # about three million tensors, as for a layout


class NamedPlace(Protocol):
    """The place of a named run of bytes in the image."""

    @property
    def name(self) -> str:
        """For messages; of a zip entry such as `archive/data/17`."""
        ...

    @property
    def offset(self) -> int:
        """In the image."""
        ...

    @property
    def nbytes(self) -> int:
        """How many there are; may be 0."""
        ...


class TensorPlace(Protocol):
    """A tensor, and the entry that has its bytes."""

    @property
    def path(self) -> str:
        """In the state."""
        ...

    @property
    def entry(self) -> int:
        """Index of the entry with its storage."""
        ...


class Mapped(Protocol):
    """An image, its chunks, and where its entries lie in it."""

    @property
    def image_bytes(self) -> int:
        """All of it."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """Of each chunk but the last."""
        ...

    @property
    def entries(self) -> Sequence[NamedPlace]:
        """Not overlapping."""
        ...


class Described(Mapped, Protocol):
    """An image and its tensors."""

    @property
    def tensors(self) -> Sequence[TensorPlace]:
        """What the entries hold."""
        ...


@dataclass(frozen=True)
class _End:
    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ImageEnds:
    """The begin and the end of an image as its two entries: all that is needed to make the tree.

    Raises:
        DamageError: They are larger than any state makes them.
    """

    image_bytes: int
    chunk_bytes: int
    head_bytes: int
    tail_offset: int

    def __post_init__(self) -> None:
        if self.nbytes > _ENDS_BYTES_MAX:
            raise DamageError(
                f"an image of {self.image_bytes} bytes has {self.nbytes} bytes outside its tensors, expected at most "
                f"{_ENDS_BYTES_MAX}"
            )

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.head_bytes + self.image_bytes - self.tail_offset

    @property
    def entries(self) -> Sequence[NamedPlace]:
        """The head and the tail."""
        tail_bytes = self.image_bytes - self.tail_offset
        return (_End("head", 0, self.head_bytes), _End("tail", self.tail_offset, tail_bytes))


def is_storage(entry: NamedPlace) -> bool:
    """Whether an entry holds the bytes of tensors."""
    folder, _, key = entry.name.rpartition("/")
    return folder.endswith("/data") and key.isascii() and key.isdecimal()


def ends_of(image: Mapped) -> tuple[int, int]:
    """Where the head ends and the tail begins: all tensors lie between them."""
    storages = [entry for entry in image.entries if is_storage(entry) and entry.nbytes]
    if not storages:
        return image.image_bytes, image.image_bytes
    head_bytes = min(entry.offset for entry in storages)
    tail_offset = min(max(entry.offset + entry.nbytes for entry in storages), image.image_bytes - _TAIL_BYTES)
    return head_bytes, max(head_bytes, tail_offset)
