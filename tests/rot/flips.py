"""Byte flips: the byte and its change, with a tally of outcomes, so that no test passes without flipping anything.

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
    """A change of one byte: half of the flips change one bit, half any bits."""

    offset: int
    mask: int

    def applied(self, data: bytes) -> bytes:
        """Return `data` with the flip."""
        return data[: self.offset] + bytes([data[self.offset] ^ self.mask]) + data[self.offset + 1 :]

    def apply(self, memory: memoryview | bytearray) -> None:
        """Flip in place; a second call undoes the flip."""
        memory[self.offset] ^= self.mask


def flips(seed: str, nbytes: int, count: int = COUNT) -> Iterator[Flip]:
    """Yield `count` flips of `nbytes` bytes. No byte is flipped again before every byte was flipped."""
    chance = random.Random(seed)
    order: list[int] = []
    for number in range(count):
        if not order:
            order = chance.sample(range(nbytes), nbytes)
        mask = 1 << chance.randrange(8) if number % 2 else chance.randrange(1, 256)
        yield Flip(order.pop(), mask)
