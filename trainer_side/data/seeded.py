"""`SeededSamples`: augmentations of a sample that are the same in every process and every attempt.

    (epoch, index) ─► seeds of torch, NumPy, Python ─► data[index] ─► the generators as before

A plain loader's workers draw augmentations from their own generators, which are lost with the workers.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Protocol

import numpy as np
import torch.utils.data

from holdfast.errors import StateError
from trainer_side.opaque import opaque_methods
from trainer_side.state.rng import isolated_rng


class _MapStyle(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...
    def __len__(self) -> int: ...


@opaque_methods
class SeededSamples(torch.utils.data.Dataset[Any]):
    """A map-style data set whose random numbers depend only on seed, epoch and sample.

    While `data[index]` runs, torch's generator on the CPU, NumPy's global one and Python's are seeded. The loader must
    read `sampler.ahead(batch_size, epochs=True)`.

    Args:
        data: The data set to read from.
        seed: Seed of the random numbers.
    """

    def __init__(self, data: _MapStyle, *, seed: int) -> None:
        self._data, self._seed = data, seed

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, sample: tuple[int, int]) -> Any:
        if not isinstance(sample, tuple):
            raise StateError(
                f"SeededSamples: expected (epoch, index), got {sample!r}; "
                "make the loader with batch_sampler=sampler.ahead(batch_size, epochs=True)"
            )
        epoch, index = sample
        place = f"{self._seed}/{epoch}/{index}"
        seed = hashlib.sha256(place.encode()).digest()
        before = np.random.get_state(), random.getstate()
        try:
            np.random.seed(np.frombuffer(seed, dtype="<u4"))
            random.seed(seed)
            with isolated_rng(place):
                return self._data[index]
        finally:
            np.random.set_state(before[0])
            random.setstate(before[1])
