"""When the interpreter may search for garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_collections"]


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """The search for garbage in cycles pauses in the whole process. Any thread, one at a time.

    A capture makes thousands of objects and drops them at once; a plan makes dozens for each tensor and keeps them.
    Each few hundred set off a search, and now and then one through all objects that there are: with torch imported a
    quarter of a second, in `save()`, for nothing. What is dropped before the pause ends does not count towards the
    next search.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
