"""Doubts about slices that ranks wrote to the store themselves, in the store beside them.

    RUN/slices/doubts-a002-r00001.json    what rank 1 of attempt 2 doubts (holdfast/ring/doubts.py has the format)

A rank writes its own once. The portable file that is made of such slices has the doubt in its manifest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from holdfast.errors import DamageError, StoreMissing
from holdfast.ring.doubts import DoubtedSteps, from_bytes, to_bytes
from holdfast.store.base import ObjectInfo, Store

_log = logging.getLogger("holdfast.catalog")

_NAME = re.compile(r"slices/doubts-a(\d{3,18})-r(\d{5,10})\.json")
_BYTES_MAX = 1 << 20


def attempt_of(name: str) -> int | None:
    """The attempt in the name of such an object; None: it is none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def write_doubt(store: Store, steps: DoubtedSteps) -> None:
    """Write down what a rank doubts. Raises `StoreError`."""
    name = f"slices/doubts-a{steps.attempt:03d}-r{steps.doubt.rank:05d}.json"
    store.write(name, to_bytes([steps]))


def read_doubts_of(store: Store, objects: Iterable[ObjectInfo]) -> list[DoubtedSteps]:
    """What ranks doubt, by this listing of the run. Raises `StoreError`."""
    found: list[DoubtedSteps] = []
    for info in objects:
        if attempt_of(info.name) is None:
            continue
        try:
            found += from_bytes(store.read(info.name, _BYTES_MAX), source=f"{store.url}/{info.name}")
        except StoreMissing:  # its attempt was cleared away meanwhile
            continue
        except DamageError as error:
            _log.error("%s: which slices are doubtful cannot be read: %s", info.name, error)
    return found
