"""The parts of one checkpoint of a given shape: messages, chunks and bytes, by the rules of docs/wire.md and
docs/ring.md. Computed, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from operator_side.simulate.scale import Shape, part_bytes_min

__all__ = ["MessageLoad"]

_JOURNAL_STATES = 3  # FILLING, FULL, FREE
_MESSAGES_PER_RANK = 4  # OFFER, DONE, STAGED, DURABLE
_MESSAGES_PER_FRAME = 2  # CREDIT, SENT


@dataclass(frozen=True, slots=True)
class MessageLoad:
    """The messages, chunks and bytes of one checkpoint.

    Attributes:
        slice_bytes: Bytes that one rank sends, and the size of each of its staging areas.
        frames_max: Most frames of all ranks together. Each rank with bytes in a chunk sends one frame for it; a rank
            shares at most its first and last chunk with others, unless values have an owner.
        control_messages_max: Most messages to and from the stager if it declines no step and no rank resends a part.
        part_bytes_min: Smallest part size in S3 for such a file, in whole chunks.
    """

    slice_bytes: int
    chunks: int
    frames_max: int
    control_messages_max: int
    journal_writes: int
    part_bytes_min: int

    @classmethod
    def of(cls, shape: Shape) -> MessageLoad:
        frames = shape.chunks + shape.ranks - 1
        return cls(
            -(-shape.image_bytes // shape.ranks),
            shape.chunks,
            frames,
            cls.control_messages(shape.ranks, frames),
            _JOURNAL_STATES * shape.chunks,
            part_bytes_min(shape),
        )

    @staticmethod
    def control_messages(ranks: int, frames: int) -> int:
        """Largest number of messages to and from the stager for `frames` of all ranks."""
        return _MESSAGES_PER_RANK * ranks + _MESSAGES_PER_FRAME * frames
