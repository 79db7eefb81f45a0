"""`Permutation`: the order of a data set as a function that computes the sample at any place.

    place ─► (left, right) ─► 24 Feistel rounds, keys from the name ─► sample; if out of range, the rounds again

Nothing is stored, so the billionth place costs as much as the first. The construction is the generalised Feistel cipher
with cycle walking of Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002). Mitchell, Stokes, Frank
and Holmes, "Bandwidth-Optimal Random Shuffling for GPUs" (2021), shuffle with such a cipher, and use 24 rounds. The
permutation makes fair orders, but is not cryptographically secure.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# An even number, so that the halves end where they began. With 8 rounds the orders of 5 samples are visibly not equally
# likely.
_ROUNDS = 24
_U64 = np.uint64


class Permutation:
    """A permutation of `range(length)`, at least 1: the same for the same name on every machine, with every release."""

    def __init__(self, length: int, name: str) -> None:
        self._length = length
        # The smallest square that holds all places, without unneeded columns: few values are out of range.
        self._rows = math.isqrt(length - 1) + 1
        self._columns = -(-length // self._rows)
        keys = hashlib.shake_256(name.encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(keys, dtype="<u8").astype(_U64)

    def at(self, first: int, count: int) -> list[int]:
        """Return the samples at the `count` places from `first` on."""
        values = np.arange(first, first + count, dtype=_U64)
        walking = np.arange(count)
        while len(walking):
            values[walking] = self._encipher(values[walking])
            walking = walking[values[walking] >= self._length]
        return values.tolist()

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        size, other = _U64(self._rows), _U64(self._columns)
        left, right = values // other, values % other
        for key in self._keys:
            # `left + …` cannot overflow: both are below the size, which is a square root.
            left, right = right, (left + _mix(right ^ key) % size) % size
            size, other = other, size
        return left * other + right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix all bits of each value, by the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))
