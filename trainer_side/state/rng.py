"""`RngState`: the states of all random number generators (torch's of each device, NumPy's, Python's), restored exactly.

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
from trainer_side.state import accelerator

_log = logging.getLogger("holdfast.rng")
_TWISTER = "MT19937"
_OWN = "_own"  # after a kind of device, the key for the index of the rank's own device


class RngState:
    """The global random number generators of this process: torch's on the CPU and on every accelerator, NumPy's, and
    Python's. Put it into the state as `PerRank(RngState())`. Training thread.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current states of all generators.

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
            "cuda": [],
            **_of_devices(),
            "numpy": {
                "keys": torch.from_numpy(twister["state"]["key"].astype(np.int64)),
                "position": int(twister["state"]["pos"]),
                "has_gauss": int(twister["has_gauss"]),
                "cached_gaussian": float(twister["gauss"]),
            },
            "python": {
                "version": int(version),
                "internal": torch.tensor(internal, dtype=torch.int64, device="cpu"),
                "gauss_next": gauss_next,
            },
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set all generators to the states in `saved`.

        The device that this rank trains on gets the state of the device that it trained on before, at any index; other
        devices get the state of their index. Files from before 0.2 do not record the rank's device: from those every
        device gets the state of its index.

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
        for kind in accelerator.KINDS:
            _set_devices(kind, saved.get(kind, []), saved.get(kind + _OWN))


def _of_devices() -> dict[str, Any]:
    """Return the states of all devices by index, and the index of this rank's own device."""
    found: dict[str, Any] = {}
    for kind in accelerator.KINDS:
        module = accelerator.module_of(kind)
        if module.is_available():
            # These states live in host memory: reading them makes no context on the other ranks' devices.
            found[kind] = module.get_rng_state_all()
            own = accelerator.own_device()
            found[kind + _OWN] = int(module.current_device() if own is None else own.index)
    return found


def _set_devices(kind: str, states: list[torch.Tensor], own_before: int | None) -> None:
    module = accelerator.module_of(kind)
    devices = module.device_count() if module.is_available() else 0
    if devices != len(states) and (own_before is None or not devices):
        _log.warning(
            "rng: the checkpoint has random states of %d %s devices, this machine has %d devices; a device "
            "without a saved state keeps the random numbers that it has",
            len(states),
            kind.upper(),
            devices,
        )
    for index, state in enumerate(states[:devices]):
        module.set_rng_state(state.cpu(), index)
    if devices and own_before is not None:
        # Last: if the rank has moved, its device gets the state of the rank, not that of its index.
        own = accelerator.own_device()
        here = module.current_device() if own is None else own.index
        module.set_rng_state(states[own_before].cpu(), here)


@contextmanager
def isolated_rng(place: str) -> Iterator[None]:
    """Context in which torch's CPU generator depends on `place` alone; afterwards the generator is as before. Each
    loader iterator draws seeds, and a resumed run, which makes one iterator more, must not draw more.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:7]))
    try:
        yield
    finally:
        torch.set_rng_state(before)
