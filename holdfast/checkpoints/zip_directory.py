"""The records of a zip file's central directory, if all of it is as torch writes it.

    consecutive records with names of one length ─► one array of numpy    (archive/data/10 to archive/data/99)

`zipfile` makes an object of each record, which for tens of thousands takes as long as checking the bytes of a small
state. At the first unusual record (extra fields, comments, sizes above 4 GiB, names that are not ASCII) this reader
gives up, and `zipfile` reads the directory.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from holdfast.store.base import Store

_HEADER = [
    ("signature", "<u4"),
    ("made_by", "<u2"),
    ("version", "<u2"),
    ("flags", "<u2"),
    ("compression", "<u2"),
    ("time", "<u4"),
    ("crc32", "<u4"),
    ("packed", "<u4"),
    ("nbytes", "<u4"),
    ("name_bytes", "<u2"),
    ("extra_bytes", "<u2"),
    ("comment_bytes", "<u2"),
    ("attributes", "V8"),
    ("offset", "<u4"),
]
_HEADER_BYTES, _NAME_BYTES_AT = 46, 28
_RECORD_SIGNATURE = 0x02014B50
_END_SIGNATURE, _END64_SIGNATURE, _LOCATOR_SIGNATURE = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_END, _END64 = struct.Struct("<4sHHHHIIH"), struct.Struct("<4sQ4xIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_TAIL_BYTES = _END64.size + _LOCATOR.size + _END.size
_VERSION_MAX = 45
_PLAIN_FLAGS = 0x808  # the name is UTF-8; sizes follow the data
_LARGE = 0xFFFFFFFF  # marks a value that is stated elsewhere


class DirectoryRecord(NamedTuple):
    """One record of the directory."""

    crc32: int
    nbytes: int
    compression: int


def plain_directory(store: Store, name: str, nbytes: int) -> dict[bytes, DirectoryRecord] | None:
    """Return the records of a zip file by name; None if its directory is missing or not plain. Raises `StoreError`."""
    tail = _read(store, name, max(0, nbytes - _TAIL_BYTES), min(nbytes, _TAIL_BYTES))
    if len(tail) < _TAIL_BYTES:
        return None
    signature, disk, first_disk, _, count, size, offset, comment_bytes = _END.unpack_from(
        tail, _TAIL_BYTES - _END.size
    )
    if signature != _END_SIGNATURE or disk or first_disk or comment_bytes:
        return None
    end = nbytes - _END.size
    if tail[_END64.size :].startswith(_LOCATOR_SIGNATURE):
        signature, _, disk, first_disk, _, count, size, offset = _END64.unpack_from(tail)
        end = nbytes - _TAIL_BYTES
        if signature != _END64_SIGNATURE or disk or first_disk:
            return None
        if _LOCATOR.unpack_from(tail, _END64.size) != (_LOCATOR_SIGNATURE, 0, end, 1):
            return None
    if offset + size != end:
        return None
    found = _records(_read(store, name, offset, size))
    return found if found is not None and len(found) == count else None


def _records(data: bytes) -> dict[bytes, DirectoryRecord] | None:
    found: dict[bytes, DirectoryRecord] = {}
    at = 0
    while at < len(data):
        if len(data) - at < _HEADER_BYTES:
            return None
        name_bytes = int.from_bytes(data[at + _NAME_BYTES_AT : at + _NAME_BYTES_AT + 2], "little")
        record = np.dtype([*_HEADER, ("name", f"S{name_bytes}")])
        records = np.frombuffer(data, record, (len(data) - at) // record.itemsize, at)
        is_plain = (
            (records["signature"] == _RECORD_SIGNATURE)
            & (records["name_bytes"] == name_bytes)
            & (records["version"] <= _VERSION_MAX)
            & (records["flags"] & ~np.uint16(_PLAIN_FLAGS) == 0)
            & (records["extra_bytes"] == 0)
            & (records["comment_bytes"] == 0)
            & (records["packed"] == records["nbytes"])
            & (records["nbytes"] != _LARGE)
            & (records["offset"] != _LARGE)
        )
        count = len(records) if is_plain.all() else int(is_plain.argmin())
        if not count or not name_bytes:
            return None
        of_one_length = records[:count]
        stated = zip(
            *(of_one_length[field].tolist() for field in ("crc32", "nbytes", "compression")), strict=True
        )
        found.update(zip(of_one_length["name"].tolist(), map(DirectoryRecord._make, stated), strict=True))
        at += count * record.itemsize
    return found


def _read(store: Store, name: str, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    if nbytes:
        store.read_into(name, offset, memoryview(data))
    return bytes(data)
