"""Reads a safetensors file as a tree: each tensor lies in the mapped file.

With what `holdfast export` has put into its metadata it is the very tree; else a dict of tensors.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import DamageError
from trainer_side.doors.plain_values import decode
from trainer_side.doors.safetensors_format import (
    DTYPES,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    METADATA,
    VALUES,
    VALUES_FORMAT,
)


def read_safetensors(path: Path) -> tuple[Any, str | None]:
    """The tree, and the name that it had in the state if it is a part of one (`--only`).

    Raises:
        DamageError: It is not such a file.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        # Private: torch wants memory that may be written, and the file stays as it is.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        header_bytes = int.from_bytes(memory[:LENGTH_BYTES], "little")
        base = LENGTH_BYTES + header_bytes
        if header_bytes > HEADER_BYTES_MAX or base > len(memory):
            raise DamageError(
                f"{path}: the file says that its header takes {header_bytes} bytes, but it has only {len(memory)} bytes"
            )
        header = json.loads(memory[LENGTH_BYTES:base])
        metadata = header.pop(METADATA, {})
        tensors = {name: _tensor(memory, base, told) for name, told in header.items()}
        values = json.loads(metadata[VALUES]) if VALUES in metadata else None
        if values is None or values["format"] != VALUES_FORMAT:
            return tensors, None
        for name, other in values["tied"].items():
            tensors[name] = tensors[other]
        only = values["only"]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamageError(f"{path}: the file is not a safetensors file: {error!r:.200}") from error
    return decode(values["state"], tensors), None if only is None else str(only)


def _tensor(memory: mmap.mmap, base: int, told: Any) -> torch.Tensor:
    dtype, (begin, end) = DTYPES[told["dtype"]], told["data_offsets"]
    shape = [int(extent) for extent in told["shape"]]
    count = math.prod(shape)
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= len(memory) - base:
        raise ValueError(f"a tensor of {shape} at {begin} to {end}, of {len(memory) - base} bytes")
    if end - begin != count * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for a tensor of {shape} and {dtype}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    if (base + begin) % dtype.itemsize:  # other writers do not align
        return torch.frombuffer(bytearray(memory[base + begin : base + end]), dtype=dtype).reshape(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=base + begin).reshape(shape)
