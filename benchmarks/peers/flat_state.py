"""A nested state dict as one run of bytes: a header with the plain values and the tensors' places, then the tensors.

│ length, header, pad │ tensor │ tensor │ …      the header is padded to whole pages, for O_DIRECT and mmap
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.complete import IncompleteError

__all__ = ["PAGE_BYTES", "FlatState", "pages", "parsed"]

PAGE_BYTES = 4096
_LENGTH = struct.Struct("<Q")


def pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class FlatState:
    """The bytes of a state, as references to its tensors."""

    def __init__(self, state: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        text = io.BytesIO()
        torch.save(_skeleton(state, self._tensors), text)
        header = _LENGTH.pack(text.tell()) + text.getvalue()
        self._header = header.ljust(pages(len(header)), b"\0")

    @property
    def nbytes(self) -> int:
        return len(self._header) + sum(tensor.nbytes for tensor in self._tensors)

    @property
    def room_bytes(self) -> int:
        """Bytes, in whole pages, that suffice for later states of the training, whose plain values may be longer."""
        return pages(self.nbytes + len(self._header))

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the bytes in order, as flat tensors of uint8."""
        yield torch.from_numpy(np.frombuffer(self._header, np.uint8).copy())
        for tensor in self._tensors:
            if tensor.numel():
                yield tensor.contiguous().reshape(-1).view(torch.uint8)

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy all bytes to the start of `memory`, flat uint8."""
        at = 0
        for part in self.parts():
            memory[at : at + part.numel()].copy_(part)
            at += part.numel()


def parsed(data: memoryview, *, what: str) -> Any:
    """Return the state in `data`; its tensors are copies.

    Raises:
        IncompleteError: `data` is empty or shorter than its header says; the message begins with `what`.
    """
    if len(data) < _LENGTH.size or not any(data[: _LENGTH.size]):
        raise IncompleteError(f"{what}: nothing was saved")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    header = torch.load(io.BytesIO(data[_LENGTH.size : _LENGTH.size + length]), weights_only=True)
    at = pages(_LENGTH.size + length)

    def take(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        nonlocal at
        empty = torch.empty(shape, dtype=dtype)
        part = data[at : at + empty.nbytes]
        at += empty.nbytes
        if len(part) != empty.nbytes:
            raise IncompleteError(f"{what}: a tensor is cut short")
        return torch.frombuffer(bytearray(part), dtype=dtype).reshape(shape) if part else empty

    return _fill(header, take)


def _skeleton(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the tree with each tensor replaced by its shape and dtype."""
    if isinstance(tree, dict):
        return {key: _skeleton(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_skeleton(value, tensors) for value in tree]
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach())
        return {"flat_tensor": len(tensors) - 1, "shape": list(tree.shape), "dtype": tree.dtype}
    return tree


def _fill(tree: Any, take: Callable[[torch.dtype, list[int]], torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        if "flat_tensor" in tree:
            return take(tree["dtype"], tree["shape"])
        return {key: _fill(value, take) for key, value in tree.items()}
    return [_fill(value, take) for value in tree] if isinstance(tree, list) else tree
