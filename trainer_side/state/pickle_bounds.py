"""Refuses a pickle that is too costly to load, or would crash the process, before torch's unpickler sees it.

CRCs catch accidents, not an attacker who can write to the store.

    file in torch's zip format ─► no entry is compressed ─► cost of data.pkl (holdfast.pickle_cost) ─► torch.load

`torch.save` never compresses. A compressed entry may expand a thousandfold, and entries that share their bytes without
limit.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
import torch.utils.deterministic

from holdfast.errors import DamageError, StateError
from holdfast.parse_cost import InputTooLarge
from holdfast.pickle_cost import check_pickle

_DEPTH_MAX = 1000  # as in `tensor_paths`; Python's own pickle goes no deeper either
_RECORD = "data.pkl"

# Exceptions that torch's reader and unpickler raise on malformed bytes, beside their own UnpicklingError.
NOT_READABLE = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError),
    *(NotImplementedError, OSError, RuntimeError, TypeError, ValueError, struct.error),
)


def unpickler_cause(error: BaseException) -> str:
    """Return the line of an error of torch's unpickler that names what it refuses."""
    return str(error).rsplit("WeightsUnpickler error:", 1)[-1].strip().split("\n", 1)[0]


def refuse_costly_pickle(file: IO[bytes], what: str) -> None:
    """Check the pickle of a file in torch's zip format, with torch's own reader. Leaves the file at its beginning.

    `what`: Name of the file, for messages. StateError: a tuple is nested deeper than 1000 levels. DamageError: the
    pickle claims more bytes than the file has, or is too costly to load. RuntimeError: torch cannot read the file.
    """
    file.seek(0)
    reader = torch._C.PyTorchFileReader(file)
    # Only newer versions of torch report the size of a record. They spare us the directory, which may be long.
    size_of = getattr(reader, "get_record_size", None)
    if size_of is None:
        refuse_packed(file, what)
    else:
        _refuse_unpacked(what, file.seek(0, os.SEEK_END), size_of(_RECORD))
    try:
        depth = check_pickle(reader.get_record(_RECORD), _DEPTH_MAX)
    except InputTooLarge as error:
        raise DamageError(f"{what}: {_RECORD}: {error}; find out which program wrote the file") from error
    if depth > _DEPTH_MAX:
        raise StateError(
            f"{what}: holds a tuple that is nested deeper than {_DEPTH_MAX} levels; holdfast never saves such a state, "
            "so find out which program wrote the file"
        )
    file.seek(0)


def refuse_packed(file: IO[bytes], what: str) -> None:
    """Check that a file in torch's zip format has all bytes that its entries claim. Leaves the file at its beginning.

    DamageError: an entry is compressed, entries share bytes, or the file is not in this format.
    """
    file_bytes = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise DamageError(f"{what}: not a file that torch reads: {error}") from error
    packed = next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise DamageError(
            f"{what}: {packed.filename!r:.200} is compressed, which torch.save never does; its {packed.compress_size} "
            f"bytes would take {packed.file_size}; find out who wrote it, or torch.load and torch.save it once more"
        )
    _refuse_unpacked(what, file_bytes, sum(entry.file_size for entry in entries))
    file.seek(0)


def _refuse_unpacked(what: str, file_bytes: int, stated_bytes: int) -> None:
    if stated_bytes > file_bytes:
        raise DamageError(
            f"{what}: has {file_bytes} bytes, its entries say {stated_bytes}: entries overlap or are compressed, "
            "which torch.save never does; this is not its file"
        )


@contextmanager
def fill_disabled() -> Iterator[None]:
    """Context in which torch does not fill new tensors, even if the script has asked it to. One thread at a time."""
    settings: Any = torch.utils.deterministic  # a module with a property, which its stubs do not have
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before
