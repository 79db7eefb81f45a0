"""`RngState`: the states of all random number generators (torch on CPU and CUDA, NumPy, Python), restored exactly.

    state = {…, "rng": PerRank(RngState())}     each rank draws its own numbers, so a checkpoint has every rank's states

The states are saved as tensors, numbers, strings and lists, which `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from holdfast.errors import StateError

_log = logging.getLogger("holdfast.rng")
_TWISTER = "MT19937"


class RngState:
    """The global random number generators of this process, as one object with a `state_dict()`.

    They are torch's on the CPU and on every CUDA device, NumPy's global one, and Python's. Put it into the state as
    `PerRank(RngState())`. All methods must be called on the training thread.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators as they are now.

        Raises:
            StateError: NumPy's global generator was replaced by one of another kind.
        """
        twister = np.random.get_state(legacy=False)
        kind = twister["bit_generator"]
        if kind != _TWISTER:
            raise StateError(
                f"rng: NumPy's global generator is {kind}, and only {_TWISTER} can be saved; "
                "use a numpy.random.Generator of your own, and save its state as tensors and numbers"
            )
        version, internal, gauss_next = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            # The states live in host memory: asking for them makes no context on the other ranks' devices.
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": {
                "keys": torch.from_numpy(twister["state"]["key"].astype(np.int64)),
                "position": int(twister["state"]["pos"]),
                "has_gauss": int(twister["has_gauss"]),
                "cached_gaussian": float(twister["gauss"]),
            },
            "python": {
                "version": int(version),
                "internal": torch.tensor(internal, dtype=torch.int64),
                "gauss_next": gauss_next,
            },
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set all generators to the states in `saved`.

        On a machine with another number of CUDA devices, only the devices that both machines have are set.

        Raises:
            StateError: `saved` is not a result of `state_dict`.
        """
        try:
            numpy, python = saved["numpy"], saved["python"]
            keys = numpy["keys"].numpy().astype(np.uint32)
            internal = tuple(python["internal"].tolist())
            torch.set_rng_state(saved["torch"].cpu())
            np.random.set_state(
                (_TWISTER, keys, numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"])
            )
            random.setstate((python["version"], internal, python["gauss_next"]))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StateError(
                f"rng: expected what RngState.state_dict() returns, got something else ({error!r}); give the RngState "
                "the name in the state with which it was saved"
            ) from error
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices != len(saved["cuda"]):
            _log.warning(
                "rng: the checkpoint has random states of %d CUDA devices, this machine has %d devices; a device "
                "without a saved state keeps the random numbers that it has",
                len(saved["cuda"]),
                devices,
            )
        for index, state in enumerate(saved["cuda"][:devices]):
            torch.cuda.set_rng_state(state.cpu(), index)


@contextmanager
def apart(place: str) -> Iterator[None]:
    """Inside this context torch's CPU generator depends on `place` alone; after it the generator is as it was before.

    Iterators of loaders are made inside it, because making one draws the seeds of its workers: a run that resumes makes
    one iterator more than an uninterrupted run, and must not draw more numbers for it.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:7]))
    try:
        yield
    finally:
        torch.set_rng_state(before)
