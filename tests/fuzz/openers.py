"""How a process of the product opens what somebody else has written, by the kind of it: for `test_claims.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

__all__ = ["OPENERS"]


def open_import(path: Path) -> str:
    """As `holdfast import`."""
    from trainer_side.doors.foreign import open_foreign

    open_foreign(path, under=None, renamed={}, dropped=[])
    return "taken"


OPENERS: dict[str, Callable[[Path], str]] = {"import": open_import}
