"""Documents with one field misspelt, to see that a checker knows every word of them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

__all__ = ["fields_of", "misspelt_at"]

_Document = TypeVar("_Document")


def fields_of(value: Any, path: tuple[Any, ...], free: Collection[str]) -> Iterator[tuple[Any, ...]]:
    """The path of each field below `path`; what is below a field in `free` has names that a user chooses."""
    if isinstance(value, dict) and (not path or path[-1] not in free):
        for name, inner in value.items():
            yield (*path, name)
            yield from fields_of(inner, (*path, name), free)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from fields_of(inner, (*path, number), free)


def misspelt_at(document: _Document, path: tuple[Any, ...]) -> _Document:
    """A copy with a letter added to the name of the field at `path`."""
    mutant = copy.deepcopy(document)
    parent: Any = mutant
    for step in path[:-1]:
        parent = parent[step]
    parent[f"{path[-1]}x"] = parent.pop(path[-1])
    return mutant
