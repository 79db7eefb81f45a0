"""The tensors of a tree, and the storages under them: what is copied, from where, and how much of it.

    model/embed.weight ─┐
    model/head.weight  ─┴─► storage 0: bytes 0..N          tied tensors share one
    window = big[10:20] ──► storage 1: bytes 40..80        only the part that the state's tensors use is saved

Storages are numbered in pickle's order, as `torch.save` names them.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter, eq, mul
from typing import Any, NamedTuple, Self

import torch
from torch.nn.parameter import Parameter

from holdfast.errors import StateError
from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import NamedTensor, PendingNumber, children, tensor_paths, tensor_refusal


class StorageSource(NamedTuple):
    """The used part of one storage, where it lies now. Keeps the storage alive."""

    entry: int  # of the layout
    storage: torch.UntypedStorage
    start_bytes: int  # where the used part begins in the storage
    nbytes: int
    data_ptr: int
    device: torch.device

    def bytes(self) -> torch.Tensor:
        """Return the used part as a one-dimensional uint8 tensor that shares its memory."""
        alias = torch.empty(0, dtype=torch.uint8, device=self.device)
        return alias.set_(self.storage, self.start_bytes, (self.nbytes,), (1,))


Sources = Sequence[StorageSource | None]
"""Per entry of a layout, where its bytes lie; None if `Capture.contents` or another rank has them."""


class TensorSpec(NamedTuple):
    """The properties of one tensor that must stay the same for a plan to fit. `offset` counts elements from the start
    of the used part of storage number `storage`.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int


class StoragePart(NamedTuple):
    storage: torch.UntypedStorage
    start_bytes: int
    nbytes: int

    def source(self, entry: int) -> StorageSource:
        address = self.storage.data_ptr() + self.start_bytes if self.nbytes else 0
        return StorageSource(entry, self.storage, self.start_bytes, self.nbytes, address, self.storage.device)


@dataclass(frozen=True)
class Survey:
    """Result of `survey`."""

    specs: tuple[TensorSpec, ...]
    parts: tuple[StoragePart, ...]
    numbers: dict[int, int]  # `UntypedStorage._cdata` to the storage's number
    paths: dict[int, str]  # `id()` of each tensor object to its path
    signature: tuple[Any, ...]  # equal for two trees if one plan fits both

    @cached_property
    def first_specs(self) -> dict[int, TensorSpec]:
        """The first tensor on each storage."""
        return {slot.storage: slot for slot in reversed(self.specs)}

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the storage under `tensor`; None if it is not in the tree."""
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def description(self, slot: TensorSpec) -> str:
        """Return the dtype, and all else that must agree for replicas of the tensor to be interchangeable."""
        first = self.first_specs[slot.storage]
        text = slot.dtype
        if slot.stride != _contiguous_stride(slot.shape):
            text += f", strides {slot.stride}"
        if first is not slot or slot.offset:
            text += f", at element {slot.offset} of the storage of {first.path}"
        return text


def survey(tree: Any) -> Survey:
    """Find the tensors of `tree` and the used parts of their storages. Training thread. StateError: names a tensor."""
    found = tensor_paths(tree)
    numbers: dict[int, int] = {}
    used: list[_UsedRange] = []
    placed: list[int] = []
    for named in found:
        reason = tensor_refusal(named.tensor)
        if reason is not None:
            raise StateError(f"{named.path} is {reason}")
        storage = named.tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(used))
        if number == len(used):
            used.append(_UsedRange(storage))
        used[number].include(named)
        placed.append(number)
    parts = tuple(one.part() for one in used)
    specs = tuple(_spec_of(named, number, parts[number]) for named, number in zip(found, placed, strict=True))
    paths = {id(named.tensor): named.path for named in reversed(found)}
    return Survey(specs, parts, numbers, paths, (specs, tuple(part.nbytes for part in parts)))


class _UsedRange:
    """The range of a storage that tensors use; grows."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._first: int | None = None
        self._end = 0
        self._itemsize = 1

    def include(self, named: NamedTensor) -> None:
        tensor = named.tensor
        if not tensor.numel():
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = int(tensor.storage_offset()) * tensor.itemsize
        end = first + (last + 1) * tensor.itemsize
        if end > self._storage.nbytes():
            raise StateError(
                f"{named.path} reaches to byte {end} of a storage of {self._storage.nbytes()} bytes, because its "
                "memory was freed; save it while it is whole"
            )
        self._first = first if self._first is None else min(self._first, first)
        self._end = max(self._end, end)
        self._itemsize = max(self._itemsize, tensor.itemsize)

    def part(self) -> StoragePart:
        # Offsets within a storage count elements, so the part begins at a whole element of its largest dtype.
        start = (self._first or 0) // self._itemsize * self._itemsize
        return StoragePart(self._storage, start, self._end - start)


def _spec_of(named: NamedTensor, number: int, part: StoragePart) -> TensorSpec:
    tensor = named.tensor
    # An empty tensor may point anywhere; it has no bytes.
    offset = int(tensor.storage_offset()) - part.start_bytes // tensor.itemsize if tensor.numel() else 0
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(named.path, dtype, tuple(tensor.shape), tensor.stride(), offset, number)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = (max(1, size) for size in reversed(shape[1:]))
    return tuple(accumulate(sizes, mul, initial=1))[::-1] if shape else ()


_Kind = str | type
_PLAIN, _TENSOR, _STRANGE = "plain", "tensor", "strange"
_DICT, _LIST, _OTHER_CONTAINER = "dict", "list", "other"
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
_NOT_PLAIN = (RuntimeError, AttributeError)  # raised by sparse, nested and other tensors without a storage


class _ContainerRow(NamedTuple):
    keys: tuple[Any, ...] | None  # of its values; None for a list or a tuple
    types: tuple[type, ...]
    kinds: tuple[_Kind, ...]
    tensors: tuple[int, ...]  # places of the tensors in it
    containers: tuple[int, ...]  # places of the containers in it
    repeated: tuple[int, ...]  # places of containers in it that occurred before


class _Kinds(dict[type, _Kind]):
    """Class → kind; an unknown class is a kind of its own."""

    def __missing__(self, kind: type) -> _Kind:
        if issubclass(kind, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage | PerRank):
            return _STRANGE
        # Not stored: the class may be short-lived.
        return _OTHER_CONTAINER if issubclass(kind, dict | list | tuple) else kind


_DICTS = frozenset({dict, OrderedDict, Counter})
_KINDS = _Kinds({torch.Tensor: _TENSOR, Parameter: _TENSOR, list: _LIST, tuple: _LIST})
_KINDS.update(dict.fromkeys(_DICTS, _DICT))
_KINDS.update(dict.fromkeys((bool, int, float, complex, str, bytes, type(None), PendingNumber), _PLAIN))


class TreeContents(NamedTuple):
    """The contents of a tree that has the outline."""

    tensors: list[torch.Tensor]  # all of them; those of one container together
    containers: list[Any]  # all of them, breadth first
    is_exact: bool  # tensors and containers have the same classes as in the outline, not only the same kinds


class Outline:
    """Keys, classes and kinds of all values in one tree. Keeps nothing of the tree alive except keys."""

    def __init__(self, rows: list[_ContainerRow]) -> None:
        self._rows = rows

    @classmethod
    def of(cls, tree: Any) -> tuple[Self, TreeContents] | None:
        """Return the outline of a dict, and its contents; None if only `tensor_paths` can judge it: tensor subclasses,
        storages, keys of unknown classes.
        """
        rows: list[_ContainerRow] = []
        tensors: list[torch.Tensor] = []
        containers, seen = [tree], {id(tree)}
        for node in containers:  # grows
            keys, values = keys_and_values(node)
            types = tuple(map(type, values))
            kinds = tuple(map(_KINDS.__getitem__, types))
            if _STRANGE in kinds or not _KEYS.issuperset(map(type, keys or ())):
                return None
            tensor_places = tuple(place for place, kind in enumerate(kinds) if kind is _TENSOR)
            container_places = tuple(place for place, kind in enumerate(kinds) if kind in _CONTAINERS)
            tensors += map(values.__getitem__, tensor_places)
            repeated = []
            for place in container_places:
                if id(values[place]) in seen:
                    repeated.append(place)
                else:
                    seen.add(id(values[place]))
                    containers.append(values[place])
            rows.append(_ContainerRow(keys, types, kinds, tensor_places, container_places, tuple(repeated)))
        return cls(rows), TreeContents(tensors, containers, is_exact=True)

    @property
    def is_plain(self) -> bool:
        """Whether the classes of all values are known here."""
        return all(_PLAIN_KINDS.issuperset(row.kinds) for row in self._rows)

    def walk(self, tree: Any) -> TreeContents | None:
        """Return the contents of another tree, in the same order; None if it has another outline."""
        tensors: list[torch.Tensor] = []
        containers, seen = [tree], {id(tree)}
        is_exact = True
        for node, row in zip(containers, self._rows, strict=False):  # grows
            keys, values = keys_and_values(node)
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
                if (id(value) in seen) != (place in row.repeated):
                    return None
                if place not in row.repeated:
                    seen.add(id(value))
                    containers.append(value)
        return TreeContents(tensors, containers, is_exact)


def keys_and_values(node: Any) -> tuple[tuple[Any, ...] | None, Sequence[Any]]:
    """Return the keys of a container, or None if its values are numbered, and the values."""
    if type(node) in _DICTS:
        return tuple(node), [*node.values()]
    if type(node) is list or type(node) is tuple:
        return None, node
    pairs = [*children(node)]
    return tuple([key for key, _ in pairs]), [value for _, value in pairs]


class TensorFacts:
    """All properties of tensors that affect a survey and a pickle, except bytes and addresses. Keeps none alive."""

    def __init__(self, tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        # Only complex tensors can be conjugate, and `storages` compares the dtype first.
        self._facts = (*_FACTS, torch.Tensor.is_conj) if any(map(torch.is_complex, tensors)) else _FACTS
        self._of_each = [[*map(fact, tensors)] for fact in self._facts]
        self._storage_bytes = [*map(torch.UntypedStorage.nbytes, storages)]
        self._shared_storages = _EqualityPattern([*map(_address, storages)])
        self._same_objects = _EqualityPattern([*map(id, tensors)])

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Self | None:
        """Return the facts of these; None if a tensor has attributes of its own, or is not plain and strided."""
        with contextlib.suppress(*_NOT_PLAIN):
            if not any(map(vars, tensors)):  # attributes are pickled with it
                return cls(tensors, [*map(torch.Tensor.untyped_storage, tensors)])
        return None

    def storages(self, tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage] | None:
        """Return the storage of each of these tensors, if the same facts hold for them; else None."""
        try:
            if len(tensors) != len(self._storage_bytes) or any(map(vars, tensors)):
                return None
            for fact, known in zip(self._facts, self._of_each, strict=True):
                if not all(map(eq, map(fact, tensors), known)):
                    return None
            storages = [*map(torch.Tensor.untyped_storage, tensors)]
        except _NOT_PLAIN:
            return None
        same = (
            all(map(eq, map(torch.UntypedStorage.nbytes, storages), self._storage_bytes))
            and self._shared_storages.matches([*map(_address, storages)])
            and self._same_objects.matches([*map(id, tensors)])
        )
        return storages if same else None


class _EqualityPattern:
    """Which of several values are equal to one another, regardless of the values themselves."""

    def __init__(self, values: list[int]) -> None:
        self._count = len(values)
        # Nearly always all differ; a set checks that in a third of the time.
        self._firsts = None if len(set(values)) == self._count else _firsts(values)

    def matches(self, values: list[int]) -> bool:
        if len(values) != self._count:
            return False
        return len(set(values)) == self._count if self._firsts is None else _firsts(values) == self._firsts


def _firsts(values: list[int]) -> list[int]:
    """Return, for each value, the place of the first that equals it."""
    first = dict(zip(reversed(values), range(len(values) - 1, -1, -1), strict=True))
    return [*map(first.__getitem__, values)]
