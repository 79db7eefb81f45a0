"""Memory that is about to be filled, with deterministic algorithms switched on: torch must not fill it before.

`torch.use_deterministic_algorithms(True)` fills each new tensor with NaN, for which some dtypes (bits8) have no code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


@contextmanager
def unfilled() -> Iterator[None]:
    """In this context new tensors have no values yet, whatever the script has chosen. One thread at a time."""
    settings: Any = torch.utils.deterministic  # a module with a property, which its stubs do not have
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before
