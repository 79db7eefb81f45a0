"""Writes NumPy scalars in a state as the Python numbers and texts that they equal.

    {"loss": np.float64(0.5), np.int64(3): np.bool_(True)}  ─►  {"loss": 0.5, 3: True}

A pickle of a NumPy scalar names NumPy's own functions, which `torch.load(weights_only=True)` refuses. The tree is
looked through only when a pickler has met a scalar: most states have none. What Python has no equal for (longdouble,
dates, records) is left as it is, and refused by its path.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from trainer_side.state.containers import children, with_changes

_PYTHON = (bool, int, float, complex, str, bytes)


class MetNumpyScalar(pickle.PicklingError):
    """Ends a pickle: the tree has to be pickled `with_python_scalars`."""


def is_scalar(value: Any) -> bool:
    """Whether it is a NumPy scalar of which Python has an equal value."""
    # Of dates and durations `item()` may drop the unit.
    if not isinstance(value, np.generic) or isinstance(value, np.datetime64 | np.timedelta64 | np.void):
        return False
    return type(value.item()) in _PYTHON


def with_python_scalars(tree: Any) -> Any:
    """The same tree with Python's values; containers without any are the same objects, and what is shared stays so."""
    done: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item() if is_scalar(value) else value
        if not isinstance(value, dict | list | tuple):
            return value
        if id(value) not in done:
            done[id(value)] = value  # of one that holds itself
            done[id(value)] = _changed(value, {key: of(one) for key, one in children(value)}, of)
        return done[id(value)]

    return of(tree)


def _changed(node: Any, values: dict[Any, Any], of: Any) -> Any:
    if isinstance(node, dict) and any(isinstance(key, np.generic) for key in node):
        pairs = [(of(key), value) for key, value in values.items()]
        if type(node) is dict:
            return dict(pairs)
        other = with_changes(node, {})
        other.clear()
        for key, value in pairs:
            other[key] = value
        return other
    changed = {key: values[key] for key, value in children(node) if values[key] is not value}
    return with_changes(node, changed) if changed else node
