"""Takes the digest of a step from the state and the arguments of `step()`, without waiting for a device.

A mark at a checkpoint shows which random number generators the next step has drawn from. A generator that is neither
saved nor used is seeded differently in each process, and proves nothing.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.crc import crc32
from trainer_side.proof.step_digest import StepDigest
from trainer_side.state import accelerator
from trainer_side.state.data_place import DataPlace
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState
from trainer_side.state.value_crc import DeferredNumber, ValueCrc, tensor_crc


class StepInput(NamedTuple):
    """The arguments of `step()` for the proof of a resume."""

    batch: Any = None
    loss: Any = None
    grad_norm: Any = None


class PendingDigest:
    """The digest of one step, parts of which may still be in transfer from a device."""

    def __init__(
        self, digest: StepDigest, step_input: StepInput, rates: Mapping[str, list[DeferredNumber]]
    ) -> None:
        self._digest, self._rates = digest, rates
        self._batch = None if step_input.batch is None else ValueCrc(step_input.batch)
        self._loss, self._grad_norm = DeferredNumber(step_input.loss), DeferredNumber(step_input.grad_norm)

    @property
    def ready(self) -> bool:
        """Whether `digest` need not wait for a device."""
        numbers = [self._loss, self._grad_norm, *(one for rates in self._rates.values() for one in rates)]
        return (self._batch is None or self._batch.ready) and all(number.ready for number in numbers)

    def digest(self) -> StepDigest:
        """Return the digest; waits for the device unless `ready`."""
        return replace(
            self._digest,
            batch=None if self._batch is None else self._batch.value(),
            rates={name: _without_repeats(rates) for name, rates in self._rates.items()},
            loss=self._loss.value(),
            grad_norm=self._grad_norm.value(),
        )


class DigestTaker:
    """Takes digests of steps of one training. Training thread. `state`: Names mapped to objects, as in checkpoints."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        objects = {
            name: value.value if isinstance(value, PerRank) else value for name, value in state.items()
        }
        self._places = {name: value for name, value in objects.items() if isinstance(value, DataPlace)}
        self._optimizers = {name: value for name, value in objects.items() if hasattr(value, "param_groups")}
        self._classes = {
            name: _class_name(value)
            for name, value in objects.items()
            if name in self._optimizers or isinstance(value, LRScheduler)
        }
        self._saves_generators = any(isinstance(value, RngState) for value in objects.values())
        self._marked: dict[str, int] | None = None

    def mark(self) -> None:
        """Remember places in the data and generators, just after a checkpoint."""
        for place in self._places.values():
            place.mark_place()
        self._marked = None if self._saves_generators else generator_crcs()

    def take(self, step: int, step_input: StepInput, *, is_marked: bool | None = None) -> PendingDigest:
        """Take the digest of the step that ends now.

        `is_marked`: For a digest to record: whether `mark` was called at the checkpoint before the step. The digest
        then has only generators that a resumed run must have in the same state. None: for a comparison.
        """
        generators, data = generator_crcs(), {}
        if is_marked is not None and not self._saves_generators:
            marked = (self._marked if is_marked else None) or generators
            generators = {name: crc for name, crc in generators.items() if marked.get(name) != crc}
        for name, place in self._places.items():
            with suppress(Exception):  # a source may be unable to tell its place now
                data[name] = place.place()
                if is_marked is False:
                    data[name].pop("from", None)
        rates = {name: _rates(optimizer) for name, optimizer in self._optimizers.items()}
        digest = StepDigest(step, data, generators=generators, classes=self._classes)
        return PendingDigest(digest, step_input, rates)


def generator_crcs() -> dict[str, int]:
    """Return the CRC-32 of the state of each global random number generator in this process."""
    twister = np.random.get_state(legacy=False)
    version, internal, gauss_next = random.getstate()
    found = {
        "torch": tensor_crc(torch.get_rng_state()),
        "NumPy": crc32(repr((twister["bit_generator"], twister.get("gauss"))).encode(), _state_crc(twister)),
        "Python": crc32(repr((version, gauss_next)).encode(), crc32(array("L", internal).tobytes())),
    }
    device = accelerator.own_device()
    if device is not None and not accelerator.is_capturing():
        with suppress(Exception):  # a device may refuse during graph capture
            found[f"torch on {device.type}"] = tensor_crc(accelerator.module_of(device).get_rng_state(device))
    return found


def _state_crc(twister: Mapping[str, Any]) -> int:
    state = twister["state"]
    key = state.get("key")
    rest = {name: value for name, value in state.items() if name != "key"}
    key_crc = 0 if key is None else crc32(np.ascontiguousarray(key).tobytes())
    return crc32(repr(sorted(rest.items())).encode(), key_crc)


def _class_name(value: Any) -> str:
    """Return the class of an optimizer or a scheduler, and those of the schedulers in it."""
    inner = getattr(value, "_schedulers", None)
    name = type(value).__name__
    return f"{name} of {', '.join(map(_class_name, inner))}" if isinstance(inner, list) else name


def _rates(optimizer: Any) -> list[DeferredNumber]:
    return [DeferredNumber(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _without_repeats(rates: list[DeferredNumber]) -> tuple[float, ...]:
    """Merge equal neighbours: many groups have one rate."""
    values = (rate.value() for rate in rates)
    return tuple(value for value, _ in itertools.groupby(value for value in values if value is not None))
