"""Names inside a run: which are valid, and where unfinished objects lie.

Names come from manifests and listings, which are input from outside: each passes `check_name` before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TypeAlias

from holdfast.errors import StoreError

TEMPORARY = ".holdfast/tmp/"
"""Prefix of everything unfinished; never listed, and removed by `sweep`."""

Keep: TypeAlias = Collection[str] | Callable[[str], bool]
"""Unfinished uploads that a sweep leaves: their write-ids, or a predicate for a text that begins with the write-id."""

_NAME_BYTES_MAX = 512
_WRITE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(name: str) -> str:
    """Return `name` if it is valid. Raises `StoreError` if it leads out of the run, is malformed, or is temporary."""
    parts = name.split("/")
    wrong = (
        any(part in ("", ".", "..") for part in parts)
        or "\\" in name
        or any(ord(character) < 32 or ord(character) == 127 for character in name)
        or len(name.encode(errors="replace")) > _NAME_BYTES_MAX
        or f"{name}/".startswith(TEMPORARY)
    )
    if wrong:
        raise StoreError(
            f"name {name[:80]!r} is refused: names are relative to the run, joined by '/', without '..', control "
            f"characters or backslashes, at most {_NAME_BYTES_MAX} bytes, and not under {TEMPORARY}"
        )
    return name


def check_write_id(write_id: str) -> str:
    """Return `write_id` if it can be part of a name: letters, digits, `_`, `.` and `-`. Raises `StoreError`."""
    if not _WRITE_ID.fullmatch(write_id):
        raise StoreError(
            f"write-id {write_id[:80]!r} is refused: expected 1 to 100 letters, digits, '_', '.' or '-'"
        )
    return write_id


def temporary_name(write_id: str, name: str) -> str:
    """Return the name under which the unfinished `name` lies; it begins with `write_id`, for `sweep`."""
    return f"{TEMPORARY}{check_write_id(write_id)}-{check_name(name).replace('/', '_')}"


def is_kept(temporary: str, keep: Keep) -> bool:
    """Whether a temporary name belongs to an upload in `keep`."""
    own = temporary.removeprefix(TEMPORARY).removeprefix("upload-")
    if callable(keep):
        return keep(own)
    return any(own.startswith((f"{write_id}-", f"{write_id}.")) for write_id in keep)
