"""The format of a safetensors file: a length, a header in JSON, the tensors back to back.

    u64 little-endian: bytes of the header │ {"name": {"dtype", "shape", "data_offsets"}, …, "__metadata__"} │ bytes …

Each tensor is dense and in row-major order; there are no gaps or overlaps. All other values of a state are in
`__metadata__`, which maps text to text, under `holdfast`.
"""

from __future__ import annotations

import torch

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000  # the library's limit
METADATA = "__metadata__"
VALUES = "holdfast"
VALUES_FORMAT = "holdfast-safetensors/1"

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
