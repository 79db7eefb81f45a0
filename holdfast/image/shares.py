"""The share of each image that one of several stagers receives, and its flusher writes.

    parts   │  0  │  1  │  2  │  3  │  4  │  5  │  6  │        three writers
    shares  │     0     │     1     │        2        │

A *share* is a contiguous run of whole parts of the one upload, so that no two writers send the same part. The split
depends only on the layout, the number of writers and the size of a part, so ranks, stagers and flushers each compute it
without a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from holdfast.errors import ProtocolError
from holdfast.image.layout import Layout

WRITERS_MAX = 64
# How long ranks, and the flusher of its share, wait for a lost stager's next process before they give a step up.
LOST_STAGER_SECONDS_MAX = 60.0
_TEXT = re.compile(r"([1-9]\d{0,3})/([1-9]\d{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShareNumber:
    """Number of one stager and its flusher among all writers. `index`: From 0; writer 0 leads."""

    index: int
    writers: int

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read `K/S`, the K-th of S, from 1, such as `2/3`. ValueError: the text is something else."""
        match = _TEXT.fullmatch(text)
        if match is None or not int(match[1]) <= int(match[2]) <= WRITERS_MAX:
            raise ValueError(
                f"a share as K/S, the K-th of S stagers, such as 2/3, with S at most {WRITERS_MAX}"
            )
        return cls(int(match[1]) - 1, int(match[2]))

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.writers}"

    @property
    def is_lead(self) -> bool:
        return self.index == 0


WHOLE = ShareNumber(0, 1)
"""The only stager of a run, which receives every image as a whole."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of one image. `part_chunks`: Of each part except the last. `writers`: Stagers of the run; fewer parts
    make fewer shares. ProtocolError: a number is not positive, or there are too many writers.
    """

    chunks: int
    part_chunks: int
    writers: int

    def __post_init__(self) -> None:
        if self.chunks < 1 or self.part_chunks < 1 or not 1 <= self.writers <= WRITERS_MAX:
            raise ProtocolError(
                f"shares of {self.chunks} chunks in parts of {self.part_chunks} for {self.writers} writers; expected "
                f"at least 1 of each, and at most {WRITERS_MAX} writers"
            )

    @classmethod
    def of(cls, layout: Layout, writers: int, part_chunks: int) -> Self:
        return cls(layout.chunks, part_chunks, writers)

    @property
    def parts(self) -> int:
        """Number of parts of the image."""
        return -(-self.chunks // self.part_chunks)

    @property
    def count(self) -> int:
        """Number of shares; writers 0 to `count` - 1 have one."""
        return min(self.writers, self.parts)

    def parts_of(self, share: int) -> range:
        """Return the parts of one share; empty for a writer without a share."""
        if not 0 <= share < self.count:
            return range(0)
        return range(share * self.parts // self.count, (share + 1) * self.parts // self.count)

    def chunks_of(self, share: int) -> range:
        """Return the chunks of one share; empty for a writer without a share."""
        parts = self.parts_of(share)
        return range(self.chunks)[parts.start * self.part_chunks : parts.stop * self.part_chunks]

    def owner(self, chunk: int) -> int:
        """Return the share that a chunk of the image belongs to."""
        return ((chunk // self.part_chunks + 1) * self.count - 1) // self.parts


@dataclass(frozen=True, slots=True)
class ImageShare:
    """One share of one image."""

    shares: Shares
    index: int

    @property
    def number(self) -> ShareNumber:
        return ShareNumber(self.index, self.shares.count)

    @property
    def chunks(self) -> range:
        return self.shares.chunks_of(self.index)

    @property
    def parts(self) -> range:
        return self.shares.parts_of(self.index)
