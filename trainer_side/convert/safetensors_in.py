"""Reads a safetensors file as a tree whose tensors lie in the mapped file.

    u64 little-endian: bytes of the header │ {"name": {"dtype", "shape", "data_offsets"}, …, "__metadata__"} │ bytes …

Each tensor is dense and in row-major order; there are no gaps or overlaps. `__metadata__` maps text to text. A file of
`holdfast export` has all other values of the state there, under `holdfast`, and gives the exact tree; any other file
gives a dict of tensors.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import DamageError
from holdfast.parse_cost import PLAIN_FACTOR, check_cost, json_cost
from trainer_side.convert.plain_values import decode
from trainer_side.state.position_names import Positions, from_rows

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000  # the library's limit
METADATA = "__metadata__"
VALUES = "holdfast"
VALUES_FORMAT = "holdfast-safetensors/1"
_DIMENSIONS_MAX = 64  # of torch
_EXTENT_END = 1 << 63

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, of_torch)
    for name, of_torch in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
    }.items()
    if hasattr(torch, of_torch)
}


def read_safetensors(path: Path) -> tuple[Any, str | None, Positions]:
    """Open the file. Raises OSError; DamageError: it is not a safetensors file.

    Returns the tree, the name that it had in the state as a part of it (`--only`), and the names of numbered objects,
    with paths from the top of the state.
    """
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
            return tensors, None, {}
        for name, other in values["tied"].items():
            tensors[name] = tensors[other]
        only = values["only"]
        names = from_rows(values.get("names", {}))  # earlier versions wrote none
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamageError(f"{path}: the file is not a safetensors file: {error!r:.200}") from error
    return decode(values["state"], tensors), None if only is None else str(only), names


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
