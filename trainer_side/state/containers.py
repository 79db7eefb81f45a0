"""The containers of a state: dicts, lists, tuples and their subclasses."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """The keys and values of a dict, list or tuple (and of their subclasses); nothing of anything else."""
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def with_changes(node: Any, changed: Mapping[Any, Any]) -> Any:
    """A copy of the container in which these keys have other values."""
    if type(node) is dict:
        return {**node, **changed}
    if isinstance(node, tuple):
        values = [changed.get(index, value) for index, value in enumerate(node)]
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    other = copy.copy(node)  # with the attributes of an OrderedDict, which torch pickles
    for key, value in changed.items():
        other[key] = value
    return other
