"""Random number generators, saved and brought back exactly: torch on the CPU, on every CUDA device, NumPy, Python.

    state = {…, "rng": PerRank(RngState())}          each rank draws its own numbers, so each rank's own are saved

Only tensors, numbers, strings and lists are saved, so that `torch.load(weights_only=True)` reads them.
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
    """The global random number generators of this process, as something with a `state_dict()`. Training thread."""

    def state_dict(self) -> dict[str, Any]:
        """All states, as they are now.

        Raises:
            StateError: NumPy's global generator was replaced by one of another kind.
        """
        twister = np.random.get_state(legacy=False)
        kind = twister["bit_generator"]
        if kind != _TWISTER:
            raise StateError(
                f"rng: NumPy's global generator is {kind}, only {_TWISTER} can be saved; "
                "keep your own numpy.random.Generator and save its state as tensors and numbers"
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
        """Go on where `state_dict` was taken. On a machine with other devices, those that both have.

        Raises:
            StateError: It is not what `state_dict` gave.
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
            raise StateError(f"rng: not a saved RngState: {error!r}") from error
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices != len(saved["cuda"]):
            _log.warning(
                "rng: saved with %d CUDA devices, this machine has %d; the others go on with fresh random numbers",
                len(saved["cuda"]),
                devices,
            )
        for index, state in enumerate(saved["cuda"][:devices]):
            torch.cuda.set_rng_state(state.cpu(), index)


@contextmanager
def apart(place: str) -> Iterator[None]:
    """Inside, torch's generator on the CPU gives numbers that depend on `place` alone; behind, it is as it was.

    For beginning a loader, which draws the seeds of its workers: a run that resumes begins one more than a run that
    goes through, and must not draw one number more.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:7]))
    try:
        yield
    finally:
        torch.set_rng_state(before)
