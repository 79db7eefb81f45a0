"""Gives plain containers of the state the content that was saved, and says which plain values cannot get theirs.

The script holds the same list or dictionary that it handed to the `Checkpointer`, so the content is replaced inside it.
A number or a text is not an object that can be changed: the script must take it from `Checkpointer.restored.values`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

_REFILLED = (dict, list, set, deque)


def refill(live: Any, saved: Any) -> bool:
    """Replace the content of the container `live` by that of `saved`, recursively. Training thread.

    Tensors of equal shape and dtype are copied into those of `live`, which the script may hold elsewhere too.

    A split tensor that was saved is the live one itself, filled already.

    Returns:
        False if `live` is no container, or not of the kind that was saved; it is then unchanged.
    """
    if live is saved:
        return True
    if not _alike(live, saved):
        return False
    if isinstance(live, dict):
        content = {key: _merged(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(content)
    elif isinstance(live, list):
        old = [*live, *[None] * (len(saved) - len(live))]
        live[:] = [_merged(before, value) for before, value in zip(old, saved, strict=False)]
    elif isinstance(live, set):
        live.clear()
        live.update(saved)
    else:
        live.clear()
        live.extend(saved)
    return True


def differs(live: Any, saved: Any) -> bool:
    """Whether a plain value of the script is another one than what was saved."""
    try:
        return bool(live != saved)
    except Exception:  # noqa: BLE001 - a tuple with tensors, or a class with an `!=` of its own
        return True


def _alike(live: Any, saved: Any) -> bool:
    if isinstance(live, dict):
        return isinstance(saved, Mapping)
    return any(isinstance(live, kind) and isinstance(saved, kind) for kind in _REFILLED)


def _merged(live: Any, saved: Any) -> Any:
    if live is saved:
        return live
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if live.shape == saved.shape and live.dtype == saved.dtype:
            with torch.no_grad():
                return live.copy_(saved)
        return saved
    return live if refill(live, saved) else saved
