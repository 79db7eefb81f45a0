"""Reads a safetensors file as a tree whose tensors lie in the mapped file.

A file of `holdfast export` gives the exact tree, from its metadata; any other file gives a dict of tensors.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from holdfast.errors import DamageError
from holdfast.parse_cost import PLAIN_FACTOR, check_cost, json_cost
from trainer_side.convert.plain_values import decode
from trainer_side.convert.safetensors_format import (
    DTYPES,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    METADATA,
    VALUES,
    VALUES_FORMAT,
)
from trainer_side.state.position_names import Positions, from_rows

_DIMENSIONS_MAX = 64  # of torch
_EXTENT_END = 1 << 63


class SafetensorsState(NamedTuple):
    """Contents of a file."""

    tree: Any
    only: str | None = None  # the name that the part had in the state (`--only`)
    names: Positions = MappingProxyType({})  # of numbered objects; paths begin at the top of the state


def read_safetensors(path: Path) -> SafetensorsState:
    """Open the file. Raises OSError; DamageError: it is not a safetensors file."""
    with path.open("rb") as file:
        # A private mapping: torch needs writable memory, and the file must not change.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        header_bytes = int.from_bytes(memory[:LENGTH_BYTES], "little")
        base = LENGTH_BYTES + header_bytes
        if header_bytes > HEADER_BYTES_MAX or base > len(memory):
            raise DamageError(
                f"{path}: the file says that its header takes {header_bytes} bytes, but it has only {len(memory)} "
                f"bytes, of which a header takes at most {HEADER_BYTES_MAX}; copy it again, or find out who wrote it"
            )
        header = _json(memory[LENGTH_BYTES:base])
        metadata = header.pop(METADATA, {})
        _reject_overlaps(header)
        tensors = {name: _tensor(memory, base, entry) for name, entry in header.items()}
        values = _json(metadata[VALUES].encode()) if VALUES in metadata else None
        if values is None or values["format"] != VALUES_FORMAT:
            return SafetensorsState(tensors)
        for name, other in values["tied"].items():
            tensors[name] = tensors[other]
        only = values["only"]
        names = from_rows(values.get("names", {}))  # earlier versions wrote none
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamageError(f"{path}: the file is not a safetensors file: {error!r:.200}") from error
    return SafetensorsState(decode(values["state"], tensors), None if only is None else str(only), names)


def _json(raw: bytes) -> Any:
    check_cost(json_cost(raw), len(raw), PLAIN_FACTOR)
    return json.loads(raw)


def _reject_overlaps(header: dict[str, Any]) -> None:
    """Refuse tensors that overlap, so that copies of all tensors take no more memory than the file has bytes."""
    free = 0
    for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
        if begin < free and end > begin:
            raise ValueError(
                f"the tensor {name!r:.80} at {begin} to {end} begins before {free}, in another one"
            )
        free = max(free, end)


def _tensor(memory: mmap.mmap, base: int, entry: Any) -> torch.Tensor:
    dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
    if len(entry["shape"]) > _DIMENSIONS_MAX or any(
        not 0 <= extent < _EXTENT_END for extent in entry["shape"]
    ):
        raise ValueError(f"a tensor of {len(entry['shape'])} dimensions, {entry['shape']!r:.80}")
    shape = [int(extent) for extent in entry["shape"]]
    count = math.prod(shape)
    if not 0 <= begin <= end <= len(memory) - base:
        raise ValueError(f"a tensor of {shape} at {begin} to {end}, of {len(memory) - base} bytes")
    if end - begin != count * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for a tensor of {shape} and {dtype}")
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if (base + begin) % dtype.itemsize:  # other writers do not align
        return torch.frombuffer(bytearray(memory[base + begin : base + end]), dtype=dtype).reshape(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=base + begin).reshape(shape)
