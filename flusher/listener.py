"""Who hears what becomes of checkpoints: the stager's desk, or nobody while no stager is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from flusher.steps import Key
from flusher.upkeep import ReadBack
from holdfast.errors import HoldfastError
from holdfast.image.manifest import Manifest

__all__ = ["Durable", "Listener"]


class Listener(Protocol):
    """Told in the loop's thread."""

    def began(self, key: Key, part_chunks: int) -> None:
        """The upload takes parts of so many chunks: the ring must keep that many slots for the lowest one."""
        ...

    def freed(self, slots: tuple[int, ...]) -> None:
        """These slots are FREE in the journal."""
        ...

    def durable(self, key: Key, durable: Durable) -> None:
        """Published."""
        ...

    def read_back(self, result: ReadBack) -> None:
        """Verified, bad, or not known."""
        ...

    def failed(self, key: Key, error: HoldfastError) -> None:
        """Given up; nothing of it is in the store."""
        ...


@dataclass(frozen=True, slots=True)
class Durable:
    """What a listener is told of a published checkpoint. Not its manifest: many of these are remembered."""

    file: str
    pgt2_seconds: float
    record: dict[str, Any]  # the flusher's part of it

    @classmethod
    def of(cls, manifest: Manifest) -> Durable:
        """As its manifest has it."""
        by_flusher = manifest.record.get("flusher")
        return cls(manifest.file, manifest.pgt2_seconds, by_flusher if isinstance(by_flusher, dict) else {})
