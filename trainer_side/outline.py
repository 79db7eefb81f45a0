"""The outline of a tree: which places hold tensors, and what the tensors are like. Cheap enough for every save.

    {"model": {"w": t0, "note": 7}, "lr": [t1]}
    rows     (model, lr: dict, list) · (w, note: tensor, plain) · (0: tensor)        names and kinds, breadth first
    facts    shape, stride, dtype, device, … of t0, t1; which of them share a storage, or are the same object

Two trees of equal rows have their tensors at the same paths; with equal facts, too, one survey holds for both, whatever
their plain values and whatever memory the tensors have come to lie in. Both are compared by loops that run in C: no
Python code runs for a tensor, and little for a container.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, eq
from typing import Any, NamedTuple, Self

import torch
from torch.nn.parameter import Parameter

from trainer_side.per_rank import PerRank
from trainer_side.state import children

__all__ = ["Facts", "Outline"]

_Kind = str | type
_PLAIN, _TENSOR, _DICT, _LIST, _OTHER_CONTAINER, _STRANGE = (
    "plain",
    "tensor",
    "dict",
    "list",
    "other",
    "strange",
)
_CONTAINERS = frozenset({_DICT, _LIST, _OTHER_CONTAINER})

_FACTS: tuple[Callable[[torch.Tensor], Any], ...] = (
    type,
    attrgetter("shape", "dtype", "device", "layout", "requires_grad"),
    torch.Tensor.stride,
    torch.Tensor.storage_offset,
    torch.Tensor.is_neg,
)
_address = attrgetter("_cdata")
_NOT_PLAIN = (RuntimeError, AttributeError)  # what sparse, nested and other tensors without a storage raise


class _Row(NamedTuple):
    """One container: the names of its values (None: they are numbered), the kind of each, and the places of those that
    are containers met before.
    """

    names: tuple[str, ...] | None
    kinds: tuple[_Kind, ...]
    again: tuple[int, ...]


class _Kinds(dict[type, _Kind]):
    """Class → kind; a class of which nothing is known here is a kind of its own."""

    def __missing__(self, kind: type) -> _Kind:
        if issubclass(kind, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage | PerRank):
            return _STRANGE
        # Not kept: a class may be one that somebody makes and throws away.
        return _OTHER_CONTAINER if issubclass(kind, dict | list | tuple) else kind


_KINDS = _Kinds({torch.Tensor: _TENSOR, Parameter: _TENSOR, dict: _DICT, OrderedDict: _DICT})
_KINDS.update({list: _LIST, tuple: _LIST})
_KINDS.update(dict.fromkeys((bool, int, float, complex, str, bytes, type(None)), _PLAIN))


class Outline:
    """Of one tree. Keeps nothing of it alive."""

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows

    @classmethod
    def of(cls, tree: Any) -> tuple[Self, list[torch.Tensor]] | None:
        """The outline of a dict, and its tensors; those of one container together.

        Returns:
            None if it holds what only `tensor_paths` judges: tensor subclasses, storages.
        """
        rows: list[_Row] = []
        tensors: list[torch.Tensor] = []
        for row in _walk(tree, tensors):
            if row is None:
                return None
            rows.append(row)
        return cls(rows), tensors

    def tensors(self, tree: Any) -> list[torch.Tensor] | None:
        """Those of another tree, in the same order; None if that has another outline."""
        tensors: list[torch.Tensor] = []
        known = iter(self._rows)
        # Compared row by row: a list of what is thrown away at once would set off the garbage collector.
        same = all(row == next(known, None) for row in _walk(tree, tensors))
        return tensors if same and next(known, None) is None else None


def _walk(tree: Any, tensors: list[torch.Tensor]) -> Iterator[_Row | None]:
    """The rows of a tree, in order; finds the tensors on the way. Ends with None at what it does not know."""
    kind_of = _KINDS.__getitem__
    seen = {id(tree)}
    pending = [tree]
    for node in pending:  # grows
        names: tuple[str, ...] | None = None
        values: Sequence[Any] = node
        if type(node) is dict or type(node) is OrderedDict:
            names, values = tuple(map(format, node)), [*node.values()]
        elif type(node) is not list and type(node) is not tuple:
            pairs = [*children(node)]
            names, values = tuple([format(key) for key, _ in pairs]), [value for _, value in pairs]
        kinds = tuple(map(kind_of, map(type, values)))
        again: list[int] = []
        distinct = set(kinds)
        if distinct == {_TENSOR}:
            tensors.extend(values)
        elif _STRANGE in distinct:
            yield None
            return
        elif _TENSOR in distinct or not distinct.isdisjoint(_CONTAINERS):
            for place, (kind, value) in enumerate(zip(kinds, values, strict=True)):
                if kind is _TENSOR:
                    tensors.append(value)
                elif kind in _CONTAINERS:
                    if id(value) in seen:
                        again.append(place)
                    else:
                        seen.add(id(value))
                        pending.append(value)
        yield _Row(names, kinds, tuple(again))


class Facts:
    """All about some tensors that a survey and a pickle depend on, except bytes and addresses. Keeps none alive."""

    def __init__(self, tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        # Only complex tensors can be conjugate, and the dtype is compared before it would be asked.
        self._asked = (*_FACTS, torch.Tensor.is_conj) if any(map(torch.is_complex, tensors)) else _FACTS
        self._of_each = [[*map(fact, tensors)] for fact in self._asked]
        self._storage_bytes = [*map(torch.UntypedStorage.nbytes, storages)]
        self._shared_storages = _Identities([*map(_address, storages)])
        self._same_objects = _Identities([*map(id, tensors)])

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Self | None:
        """Facts of these; None if one of them has attributes of its own, or is not a plain strided tensor."""
        try:
            if not any(map(vars, tensors)):  # attributes are pickled with it
                return cls(tensors, [*map(torch.Tensor.untyped_storage, tensors)])
        except _NOT_PLAIN:
            pass
        return None

    def storages(self, tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage] | None:
        """The storage of each of these, if the same facts hold for them; else None."""
        try:
            if len(tensors) != len(self._storage_bytes) or any(map(vars, tensors)):
                return None
            for fact, known in zip(self._asked, self._of_each, strict=True):
                if not all(map(eq, map(fact, tensors), known)):
                    return None
            storages = [*map(torch.Tensor.untyped_storage, tensors)]
        except _NOT_PLAIN:
            return None
        same = (
            all(map(eq, map(torch.UntypedStorage.nbytes, storages), self._storage_bytes))
            and self._shared_storages.hold([*map(_address, storages)])
            and self._same_objects.hold([*map(id, tensors)])
        )
        return storages if same else None


class _Identities:
    """Which of some values are equal to one another, whatever the values themselves are."""

    def __init__(self, values: list[int]) -> None:
        self._count = len(values)
        # Nearly always all differ, and then a set says so in a third of the time.
        self._firsts = None if len(set(values)) == self._count else _firsts(values)

    def hold(self, values: list[int]) -> bool:
        """Whether the same of these are equal."""
        if len(values) != self._count:
            return False
        return len(set(values)) == self._count if self._firsts is None else _firsts(values) == self._firsts


def _firsts(values: list[int]) -> list[int]:
    """For each value, the place of the first that equals it."""
    first = dict(zip(reversed(values), range(len(values) - 1, -1, -1), strict=True))
    return [*map(first.__getitem__, values)]
