"""The outline of a tree: which places hold tensors, and what the tensors are like. Cheap enough for every save.

    {"model": {"w": t0, "note": 7}, "lr": [t1]}
    rows     (model, lr: dict, list) · (w, note: tensor, plain) · (0: tensor)        keys and kinds, breadth first
    facts    shape, stride, dtype, device, … of t0, t1; which of them share a storage, or are the same object

Two trees of equal rows have their tensors at the same paths; with equal facts, too, one survey holds for both, whatever
their plain values and whatever memory the tensors have come to lie in. Both are compared by loops that run in C: no
Python code runs for a tensor, and little for a container.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter, eq
from typing import Any, NamedTuple, Self

import torch
from torch.nn.parameter import Parameter

from trainer_side.state.arriving import Arriving
from trainer_side.state.containers import children
from trainer_side.state.per_rank import PerRank

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
_PLAIN_KINDS = frozenset({_PLAIN, _TENSOR, _DICT, _LIST})
_KEYS = frozenset({str, int, float, bool, bytes, tuple, type(None)})

_FACTS: tuple[Callable[[torch.Tensor], Any], ...] = (
    type,
    attrgetter("shape", "dtype", "device", "layout", "requires_grad"),
    torch.Tensor.stride,
    torch.Tensor.storage_offset,
    torch.Tensor.is_neg,
)
_address = attrgetter("_cdata")
_NOT_PLAIN = (RuntimeError, AttributeError)  # what sparse, nested and other tensors without a storage raise


class _ContainerRow(NamedTuple):
    """One container.

    Attributes:
        keys: Of its values; None: they are numbered.
        types, kinds: Of each value.
        tensors, containers: The places of those in it.
        again: The places of containers in it that were met before.
    """

    keys: tuple[Any, ...] | None
    types: tuple[type, ...]
    kinds: tuple[_Kind, ...]
    tensors: tuple[int, ...]
    containers: tuple[int, ...]
    again: tuple[int, ...]


class _Kinds(dict[type, _Kind]):
    """Class → kind; a class of which nothing is known here is a kind of its own."""

    def __missing__(self, kind: type) -> _Kind:
        if issubclass(kind, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage | PerRank):
            return _STRANGE
        # Not kept: a class may be one that somebody makes and throws away.
        return _OTHER_CONTAINER if issubclass(kind, dict | list | tuple) else kind


_DICTS = frozenset({dict, OrderedDict, Counter})
_KINDS = _Kinds({torch.Tensor: _TENSOR, Parameter: _TENSOR, list: _LIST, tuple: _LIST})
_KINDS.update(dict.fromkeys(_DICTS, _DICT))
_KINDS.update(dict.fromkeys((bool, int, float, complex, str, bytes, type(None), Arriving), _PLAIN))


class Walked(NamedTuple):
    """The values that were met in a tree that has the outline.

    Attributes:
        tensors: All of them; those of one container together.
        containers: All of them, breadth first.
        is_exact: Whether its tensors and containers are of the very classes, too, and not only of their kinds.
    """

    tensors: list[torch.Tensor]
    containers: list[Any]
    is_exact: bool


class Outline:
    """The outline of one tree. It keeps nothing of the tree alive but keys."""

    def __init__(self, rows: list[_ContainerRow]) -> None:
        self._rows = rows

    @classmethod
    def of(cls, tree: Any) -> tuple[Self, Walked] | None:
        """The outline of a dict, and what is in it.

        Returns:
            None if it holds what only `tensor_paths` judges: tensor subclasses, storages; or keys of unknown classes.
        """
        rows: list[_ContainerRow] = []
        tensors: list[torch.Tensor] = []
        containers, seen = [tree], {id(tree)}
        for node in containers:  # grows
            keys, values = parts_of(node)
            types = tuple(map(type, values))
            kinds = tuple(map(_KINDS.__getitem__, types))
            if _STRANGE in kinds or not _KEYS.issuperset(map(type, keys or ())):
                return None
            again = []
            for place, (kind, value) in enumerate(zip(kinds, values, strict=True)):
                if kind is _TENSOR:
                    tensors.append(value)
                elif kind in _CONTAINERS:
                    if id(value) in seen:
                        again.append(place)
                    else:
                        seen.add(id(value))
                        containers.append(value)
            tensor_places = tuple(place for place, kind in enumerate(kinds) if kind is _TENSOR)
            container_places = tuple(place for place, kind in enumerate(kinds) if kind in _CONTAINERS)
            rows.append(_ContainerRow(keys, types, kinds, tensor_places, container_places, tuple(again)))
        return cls(rows), Walked(tensors, containers, is_exact=True)

    @property
    def is_plain(self) -> bool:
        """Whether it has no value of a class of which nothing is known here."""
        return all(_PLAIN_KINDS.issuperset(row.kinds) for row in self._rows)

    def walk(self, tree: Any) -> Walked | None:
        """The same of another tree, in the same order; None if that has another outline."""
        tensors: list[torch.Tensor] = []
        containers, seen = [tree], {id(tree)}
        is_exact = True
        for node, row in zip(containers, self._rows, strict=False):  # grows
            keys, values = parts_of(node)
            if keys != row.keys:
                return None
            types = tuple(map(type, values))
            if types != row.types:
                if tuple(map(_KINDS.__getitem__, types)) != row.kinds:
                    return None
                changed = (
                    kind for kind, new, old in zip(row.kinds, types, row.types, strict=True) if new is not old
                )
                is_exact = is_exact and all(kind is _PLAIN for kind in changed)
            if len(row.tensors) == len(values):
                tensors.extend(values)
            else:
                tensors.extend(map(values.__getitem__, row.tensors))
            for place in row.containers:
                value = values[place]
                if (id(value) in seen) != (place in row.again):
                    return None
                if place not in row.again:
                    seen.add(id(value))
                    containers.append(value)
        return Walked(tensors, containers, is_exact)


def parts_of(node: Any) -> tuple[tuple[Any, ...] | None, Sequence[Any]]:
    """The keys of a container, None where its values are numbered; and the values."""
    if type(node) in _DICTS:
        return tuple(node), [*node.values()]
    if type(node) is list or type(node) is tuple:
        return None, node
    pairs = [*children(node)]
    return tuple([key for key, _ in pairs]), [value for _, value in pairs]


class TensorFacts:
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
    """Says which values are identical to one another, whatever the values themselves are."""

    def __init__(self, values: list[int]) -> None:
        self._count = len(values)
        # Nearly always all differ, and then a set says so in a third of the time.
        self._firsts = None if len(set(values)) == self._count else _firsts(values)

    def hold(self, values: list[int]) -> bool:
        if len(values) != self._count:
            return False
        return len(set(values)) == self._count if self._firsts is None else _firsts(values) == self._firsts


def _firsts(values: list[int]) -> list[int]:
    """For each value, the place of the first that equals it."""
    first = dict(zip(reversed(values), range(len(values) - 1, -1, -1), strict=True))
    return [*map(first.__getitem__, values)]
