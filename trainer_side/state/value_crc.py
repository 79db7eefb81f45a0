"""CRC-32 of a value that a script passes: the bytes of its tensors and arrays, and its numbers and texts.

Tensors on an accelerator are copied to host memory without waiting, so a `ValueCrc` is ready a little later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from holdfast.crc import crc32
from trainer_side.state import accelerator
from trainer_side.state.accelerator import StreamEvent

_DEPTH_MAX = 8


def leaves_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the values in nested mappings, lists, tuples and dataclasses, in order."""
    if depth < _DEPTH_MAX and isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_in(one, depth + 1)
    elif depth < _DEPTH_MAX and hasattr(value, "data") and isinstance(value.data, Mapping):
        yield from leaves_in(value.data, depth + 1)  # a batch of a tokenizer
    elif depth < _DEPTH_MAX and dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from leaves_in([getattr(value, one.name, None) for one in dataclasses.fields(value)], depth + 1)
    elif isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        yield from (value._indices(), value._values())
    else:
        yield value


def tensor_crc(tensor: torch.Tensor, before: int = 0) -> int:
    """Continue the CRC-32 `before` with the tensor's bytes; unchanged if it has none of its own (sparse, on `meta`)."""
    with suppress(Exception):
        here = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return crc32(here.numpy().data, before)
    return before


class ValueCrc:
    """The CRC-32 of a value as it is now. Training thread until `ready`, then any.

    Objects other than tensors, arrays, numbers and texts count by the name of their class; without any of these the
    value has no CRC-32.
    """

    def __init__(self, value: Any) -> None:
        self._has_content = False
        self._parts: list[torch.Tensor] = []
        self._arrival: StreamEvent | None = None
        crc = 0
        for leaf in leaves_in(value):
            if isinstance(leaf, torch.Tensor):
                if leaf.layout is not torch.strided or leaf.is_meta:
                    continue
                with suppress(Exception):  # a tensor that cannot be copied does not count
                    here, there = accelerator.copy_to_host(leaf.detach())
                    self._has_content, self._arrival = True, there or self._arrival
                    if there is None:
                        crc = tensor_crc(here, crc)
                    else:
                        self._parts.append(here)
            elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
                self._has_content = True
                crc = crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, crc)
            elif isinstance(leaf, bytes | bool | int | float | complex | str):
                self._has_content = True
                crc = crc32(leaf if isinstance(leaf, bytes) else repr(leaf).encode(), crc)
            else:
                crc = crc32((repr(leaf) if leaf is None else type(leaf).__qualname__).encode(), crc)
        self._crc = crc

    @property
    def ready(self) -> bool:
        return self._arrival is None or self._arrival.query()

    def value(self) -> int | None:
        """Return the CRC, or None without content; wait for the device if necessary."""
        if self._arrival is not None:
            self._arrival.synchronize()
            for part in self._parts:
                self._crc = tensor_crc(part, self._crc)
            self._parts, self._arrival = [], None
        return self._crc if self._has_content else None


class DeferredNumber:
    """A number, or a tensor of one element that may still be computed on a device."""

    def __init__(self, number: Any) -> None:
        self._number = number
        self._arrival: StreamEvent | None = None
        if isinstance(number, torch.Tensor):
            with suppress(Exception):  # a tensor that cannot be copied is not a number
                self._number = None
                here, self._arrival = accelerator.copy_to_host(number.detach())
                self._number = here.clone() if self._arrival is None else here

    @property
    def ready(self) -> bool:
        return self._arrival is None or self._arrival.query()

    def value(self) -> float | None:
        """Return the number, or None if it is not a number; wait for the device if necessary."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        with suppress(TypeError, ValueError, RuntimeError):
            return float(self._number)
        return None
