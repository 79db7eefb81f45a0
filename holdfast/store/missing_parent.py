"""A path whose parent is not there: a file system that is not mounted, more often than a new place.

Directories made on the empty mount point would take checkpoints that nobody finds again, until the root disk is full.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import StoreError
from holdfast.store import is_local, normalise_url


def refuse_missing_parent(store_url: str, *, create: bool) -> None:
    """See that a run in a directory has a place to be.

    Args:
        store_url: The run. Only paths are looked at.
        create: The setting: directories above the run's own may be made.

    Raises:
        StoreError: Neither the run's directory nor the one above it exists.
    """
    if create or not is_local(store_url):
        return
    run = Path(normalise_url(store_url))
    if _is_missing(run) and _is_missing(run.parent):
        there = next(place for place in run.parents if not _is_missing(place))
        raise StoreError(
            f"{run}: there is no directory {run.parent}; the nearest that exists is {there}. Is the file system "
            "mounted there? Mount it, or correct the path; if it is to be a new place, make the directory, or say "
            "--create"
        )


def _is_missing(path: Path) -> bool:
    try:
        os.stat(path)  # noqa: PTH116 - Path.exists takes other errors for an answer
    except FileNotFoundError:
        return True
    except OSError:
        return False  # something is there, or cannot be seen: the store's own check says what
    return False
