"""Flips: which byte, how it changes, and a tally of what was seen, so that no test passes for having flipped nothing.

for flip in flips("manifest", nbytes, COUNT):       the same ones in every run
    damaged = flip.applied(data)
    tally[...] += 1
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["COUNT", "Flip", "flips"]

COUNT = 1000
"""Random flips for each place."""


class Flip(NamedTuple):
    """One byte that changes: half of them by one bit, half by any bits."""

    offset: int
    mask: int

    def applied(self, data: bytes) -> bytes:
        """`data` with the flip."""
        return data[: self.offset] + bytes([data[self.offset] ^ self.mask]) + data[self.offset + 1 :]

    def apply(self, memory: memoryview | bytearray) -> None:
        """Flip in place; the same again takes it back."""
        memory[self.offset] ^= self.mask


def flips(seed: str, nbytes: int, count: int = COUNT) -> Iterator[Flip]:
    """`count` flips of `nbytes` bytes. Every byte is hit once before any is hit again, as far as the count goes."""
    chance = random.Random(seed)
    order: list[int] = []
    for number in range(count):
        if not order:
            order = chance.sample(range(nbytes), nbytes)
        mask = 1 << chance.randrange(8) if number % 2 else chance.randrange(1, 256)
        yield Flip(order.pop(), mask)
