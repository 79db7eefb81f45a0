"""Whole numbers that a script passes: steps, counts, ranks, seeds.

int, a NumPy integer, a 0-dim integer tensor ─► int within its bounds
a float, a bool, a text, a tensor of more dimensions, a number out of bounds ─► refused at the call

Without this check, a wrong number would fail later, in a thread or another process that cannot tell its origin.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from holdfast.errors import ConfigError, HoldfastError

STEP_MAX = 2**62 - 1  # the last step that frames, journals and file names have room for
_SHOWN = 80


def whole_number(
    value: Any,
    name: str,
    *,
    least: int | None = 0,
    most: int | None = None,
    advice: str = "",
    error: type[HoldfastError] = ConfigError,
) -> int:
    """Convert `value` to an int. Waits for a tensor on a device.

    The error's message has the argument's `name`, and `advice` about what to do instead.

    Raises:
        HoldfastError: The class `error`: `value` is no whole number, or below `least`, or above `most`.
    """
    found = _as_index(value)
    if found is not None and (least is None or found >= least) and (most is None or found <= most):
        return found
    bounds = "" if least is None else f" of at least {least}"
    if most is not None:
        bounds += f" and at most {most}" if bounds else f" of at most {most}"
    raise error(
        f"{name}: expected a whole number{bounds} (an int, a NumPy integer or a 0-dim integer tensor), "
        f"got {describe_value(value)}{f'; {advice}' if advice else ''}"
    )


def step_number(value: Any, call: str) -> int:
    """Convert the number of a training step that a script passes to `call`. ConfigError: it is no such number."""
    return whole_number(
        value,
        f"{call}: step",
        most=STEP_MAX,
        advice="count the training steps from 0, and give the number of the step",
    )


def describe_value(value: Any) -> str:
    """Return a short text for messages: the type, and the value as far as it can be printed."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - an error of __repr__ must not hide the actual message
        text = f"(its repr() raises {type(error).__name__})"
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}"


def _as_index(value: Any) -> int | None:
    if isinstance(value, bool):  # True is 1 for Python, and a mistake here
        return None
    if isinstance(value, torch.Tensor) and (value.dim() > 0 or value.dtype is torch.bool):
        return None
    try:
        return operator.index(value)
    except Exception:  # noqa: BLE001 - a value whose __index__ raises is no whole number
        return None
