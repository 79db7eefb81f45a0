"""`StepDigest`: the inputs and results of one step on one rank, in a few hundred bytes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_NAMES_MAX = 8  # objects of one kind
_RATES_MAX = 16
_CHARACTERS_MAX = 60  # of a name


@dataclass(frozen=True)
class StepDigest:
    """Digest of one step on one rank."""

    step: int
    # Name in the state → the place in the data after this step.
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    batch: int | None = None  # CRC-32 of the argument of `step(batch=…)`, if given
    # Random number generator → CRC-32 of its state after this step. In a recorded digest, only those that a resumed run
    # must have in the same state.
    generators: Mapping[str, int] = field(default_factory=dict)
    # Name of an optimizer or scheduler → its class. A saved state may fit another class as well.
    classes: Mapping[str, str] = field(default_factory=dict)
    # Name of an optimizer → its learning rates, equal neighbours once.
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    loss: float | None = None  # as given to `step()`, and so is `grad_norm`
    grad_norm: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON that is small enough for a message, however large the state is."""
        kept = {
            "step": self.step,
            "data": {name[:_CHARACTERS_MAX]: dict(place) for name, place in _first_items(self.data)},
            "batch": self.batch,
            "random": dict(_first_items(self.generators)),
            "class": {
                name[:_CHARACTERS_MAX]: kind[:_CHARACTERS_MAX] for name, kind in _first_items(self.classes)
            },
            "lr": {
                name[:_CHARACTERS_MAX]: [_to_json_number(one) for one in rates[:_RATES_MAX]]
                for name, rates in _first_items(self.rates)
            },
            "loss": _to_json_number(self.loss),
            "grad_norm": _to_json_number(self.grad_norm),
        }
        return {name: value for name, value in kept.items() if value not in (None, {})}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote. Raises `ValueError`."""
        try:
            batch = body.get("batch")
            return cls(
                int(body["step"]),
                {str(name): dict(place) for name, place in dict(body.get("data", {})).items()},
                None if batch is None else int(batch),
                {str(name): int(crc) for name, crc in dict(body.get("random", {})).items()},
                {str(name): str(kind) for name, kind in dict(body.get("class", {})).items()},
                {
                    str(name): tuple(float(one) for one in rates)
                    for name, rates in dict(body.get("lr", {})).items()
                },
                _from_json_number(body.get("loss")),
                _from_json_number(body.get("grad_norm")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no digest of a step: {error!r:.200}") from error

    def truncated(self) -> StepDigest:
        """Return the digest as `from_json` would, to compare it with a recorded one."""
        return StepDigest.from_json(self.to_json())


def _first_items(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(found.items())[:_NAMES_MAX]


def _to_json_number(number: float | None) -> float | str | None:
    # JSON has no NaN and no infinity.
    return number if number is None or math.isfinite(number) else str(number)


def _from_json_number(value: Any) -> float | None:
    return None if value is None else float(value)
