"""Estimates the memory that parsing takes: with a limit on size alone, 31 KiB of input could take a gigabyte.

    compressed ─► piece by piece ─► raw JSON ─► estimated bytes of its Python objects ─► json.loads
                      └── above `allowed(received bytes)`: refused ──┘

The estimate counts brackets, commas and quotes. Layouts and tables of real states cost about 50 bytes for each
compressed byte received, manifests about 10 for each byte (tests/unit/holdfast/test_parse_cost.py measures both).
Limits of five times that plus a fixed allowance accept all real input, and an attacker must send megabytes to make a
process take a gigabyte.
"""

from __future__ import annotations

import zlib

COMPRESSED_FACTOR = 256  # of each byte received
PLAIN_FACTOR = 24
_ALLOWANCE_BYTES = 32 << 20
_PIECE_BYTES = 1 << 20
_CONTAINER_BYTES, _ITEM_BYTES, _TEXT_BYTES = 96, 40, 60


class InputTooLarge(ValueError):
    """Parsing would take more memory than the limit for input of this size."""


def json_cost(raw: bytes) -> int:
    """Estimate the bytes of the text and of the objects that `json.loads` makes from it."""
    containers = raw.count(b"[") + raw.count(b"{")
    items = raw.count(b",") + raw.count(b":")
    return len(raw) + _CONTAINER_BYTES * containers + _ITEM_BYTES * items + _TEXT_BYTES * raw.count(b'"') // 2


def allowed_cost(received_bytes: int, factor: int) -> int:
    """Return the limit for input of this size: `factor` for each byte received, plus a fixed allowance."""
    return _ALLOWANCE_BYTES + factor * received_bytes


def check_cost(cost: int, received_bytes: int, factor: int) -> None:
    """Raise `InputTooLarge` if `cost` is above `allowed_cost`."""
    allowed = allowed_cost(received_bytes, factor)
    if cost > allowed:
        raise InputTooLarge(
            f"{received_bytes} bytes received would take {cost} bytes or more to parse, expected at most {allowed}"
        )


def inflate_json(data: bytes | bytearray | memoryview, bytes_max: int) -> bytes:
    """Decompress JSON within limits. Raises `InputTooLarge`; `ValueError`: truncated; `zlib.error`: not zlib data."""
    inflater, received_bytes = zlib.decompressobj(), len(data)
    raw, cost = bytearray(), 0
    while not inflater.eof:
        piece = inflater.decompress(data, _PIECE_BYTES)
        data = inflater.unconsumed_tail
        raw += piece
        cost += json_cost(piece)
        check_cost(cost, received_bytes, COMPRESSED_FACTOR)
        if len(raw) > bytes_max:
            raise InputTooLarge(f"above {bytes_max} bytes unpacked")
        if not piece and not data and not inflater.eof:
            raise ValueError("truncated")
    return bytes(raw)
