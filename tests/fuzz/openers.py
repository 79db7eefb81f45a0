"""Openers for `test_claims.py`: a product's process opens foreign files, by kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.intents import clear_intents
from holdfast.checkpoints.lease import Lease
from holdfast.store.generic import GenericStore
from holdfast.store.posix import PosixStore
from operator_side.drill.values import read_values

__all__ = ["OPENERS", "SMALL"]

SMALL = {
    "claim": ".holdfast/writer-000007.json",
    "intent": ".holdfast/intent-w000001-aa.json",
    "manifest": "step-000000007.json",
}
"""Small objects of a run, by kind."""


def open_import(path: Path) -> str:
    """As `holdfast import`."""
    from trainer_side.convert.import_source import open_import_source

    open_import_source(path, under=None, renamed={}, dropped=[])
    return "taken"


def open_run(path: Path) -> str:
    """Open as a reader of a run, and as its next writer: in a directory, and through fsspec."""
    for store in (PosixStore(path), GenericStore(f"file://{path}")):
        faults = [item.fault for item in Catalog(store).list()]
        claim = Lease.acquire(store)
        removed = clear_intents(store, claim.attempt, lambda _: False)
        claim.release()
        if removed or not all("not read" in fault for fault in faults):
            return f"read: {path.name}"
    return f"bounded: {path.name}"


def open_drill(path: Path) -> str:
    """Open as `holdfast drill`, which compares values without torch: the file is a data.pkl."""
    read_values(path.read_bytes(), source=str(path))
    return "taken"


OPENERS: dict[str, Callable[[Path], str]] = {"import": open_import, "store": open_run, "drill": open_drill}
