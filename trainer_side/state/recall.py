"""Recall: keeps the findings of a full capture, so that the next one is cheap if only values have changed.

    capture in full ─► survey, pickle ─► Recall.of: outline, facts, places of the storages, how each tensor is pickled
    capture         ─► Recall.recognise(tree): the same outline, the same facts?
                        ├─ yes: sources from where the storages lie now; pickle without asking torch about any tensor
                        └─ no:  None, and the capture is done in full

Each capture pickles the plain values again and checks each tensor again. The facts of a tensor include everything that
its pickle depends on. A recall is tested before it is used: it must pickle the tree that it was made from to the same
bytes as torch did.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add
from typing import Any, NamedTuple, cast

import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2, _rebuild_tensor_v3

from trainer_side.state.pickling import (
    REFUSED,
    NumpyScalarFound,
    Pickling,
    builtins_in,
    is_scalar,
    kind_of,
    with_python_scalars,
    with_readable_empty_bytes,
)
from trainer_side.state.survey import Outline, StorageSource, Survey, TensorFacts, TreeContents
from trainer_side.state.tree import PendingNumber, resolve_pending

# With str, the classes whose values are pickled without naming a class.
_KEPT = frozenset({bool, int, float, type(None), PendingNumber})


class Snapshot(NamedTuple):
    """A copy of a tree's containers, for a later pickle of the tree as it is now. Tensors are replaced by their
    `StandIn`. Containers that hold only tensors, all the way down, are the same at every save: they are copied once.
    """

    tree: Any  # the copy; a container that occurs several times is still one object
    text_length: int  # of all its strings together; keys do not count


def snapshot(tree: Any, known: Mapping[int, Any]) -> Snapshot | None:
    """Copy the containers of `tree`; None if it holds a value of an unknown class, or itself. `known`: By id(), the
    replacement of a tensor or a container.
    """
    copying = _TreeCopier(known)
    try:
        return Snapshot(copying.copy(tree), copying.text_length)
    except (ValueError, RecursionError):
        return None


class _TreeCopier:
    """Copies containers; ValueError: the tree holds a value of a class that is not copied."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        self.text_length = 0
        self._copies = {**known}  # by id(): the tree keeps the originals alive meanwhile

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _KEPT:
            return value
        if kind is str:
            self.text_length += len(value)
            return value
        if (copied := self._copies.get(id(value))) is not None:
            return copied
        # The comprehensions test the most frequent classes inline: a call per value would take several times as long.
        if kind is dict:
            copied = {key: one if type(one) in _KEPT else self.copy(one) for key, one in value.items()}
        elif kind is OrderedDict:
            copied = OrderedDict((key, self.copy(one)) for key, one in value.items())
            if attributes := vars(value):  # the version numbers in the state of a module; pickled with it
                vars(copied).update(self.copy(attributes))
        elif kind is Counter:  # a scheduler's milestones; its attributes are not pickled
            copied = Counter({key: self.copy(one) for key, one in value.items()})
        elif kind is list or kind is tuple:
            copied = kind([one if type(one) in _KEPT else self.copy(one) for one in value])
        else:
            raise ValueError(kind)
        self._copies[id(value)] = copied
        return copied


class _Constant(NamedTuple):
    """A container that holds only tensors, number `place` of a tree; `copied` replaces it in every snapshot."""

    place: int
    copied: Any
    attributes: dict[str, Any] | None  # required of a container for that; None for a class without attributes


class ConstantContainers:
    """The containers that hold only tensors in trees of one outline, and their copies.

    Keeps only keys of a tree alive. `containers`: Containers of one such tree, outer ones before inner ones; none
    contains itself. `known`: By id(), the replacement of each tensor. ValueError: a container has attributes of an
    unknown class.
    """

    def __init__(self, containers: Sequence[Any], known: Mapping[int, Any]) -> None:
        constant: set[int] = set()
        # Containers without attributes that occur once: recognising the outer container is enough. A container that
        # occurs in several places may occur in other places in another tree.
        inner: set[int] = set()
        times = Counter(id(value) for node in containers for value in _values(node) or ())
        for node in reversed(containers):
            values = _values(node)
            if values is not None and all(id(value) in known or id(value) in inner for value in values):
                constant.add(id(node))
                if times[id(node)] == 1 and not _attributes(node):
                    inner.add(id(node))
        below = {
            id(value) for node in containers if id(node) in constant for value in _values(node) or ()
        } & inner
        self._constants = [
            _Constant(place, _TreeCopier(known).copy(node), _TreeCopier(known).copy(_attributes(node)))
            for place, node in enumerate(containers)
            if id(node) in constant and id(node) not in below
        ]

    def replacements(self, containers: Sequence[Any]) -> dict[int, Any]:
        """Return, by id(), the replacements of the constant ones among another tree's containers, in the same order."""
        return {
            id(containers[place]): copied
            for place, copied, attributes in self._constants
            if _attributes(containers[place]) == attributes
        }


def _values(node: Any) -> Sequence[Any] | None:
    if type(node) is dict or type(node) is OrderedDict or type(node) is Counter:
        return [*node.values()]
    return node if type(node) is list or type(node) is tuple else None


def _attributes(node: Any) -> dict[str, Any] | None:
    return vars(node) if type(node) is OrderedDict else None


@dataclass(slots=True, eq=False)
class _Reduced:
    """Is pickled as `reduction` says."""

    reduction: tuple[Any, ...]


class StandIn(_Reduced):
    """The placeholder of a tensor in a tree that is pickled without it."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class _StorageStandIn:
    persistent_id: Any


class FastPickling:
    """Pickles a tree with a placeholder for each tensor; a tensor that occurs twice has the same one."""

    def __init__(self, stand_ins: list[StandIn], protocol: int) -> None:
        self._stand_ins, self._protocol = stand_ins, protocol

    @classmethod
    def of(cls, job: Pickling, tensors: Sequence[torch.Tensor]) -> FastPickling | None:
        """Make placeholders to pickle tensors like these again; None if the pickle of one of them cannot be reused."""
        stand_ins: dict[int, StandIn] = {}
        for tensor in tensors:
            if id(tensor) not in stand_ins:
                reduction = _reusable_reduction(job, tensor)
                if reduction is None:
                    return None
                stand_ins[id(tensor)] = StandIn(reduction)
        return cls([stand_ins[id(tensor)] for tensor in tensors], torch.serialization.DEFAULT_PROTOCOL)

    def stand_ins(self, tensors: Sequence[torch.Tensor]) -> dict[int, StandIn]:
        """Return, by id(), the placeholder of each tensor. The tensors are like those given to `of`, in that order."""
        return dict(zip(map(id, tensors), self._stand_ins, strict=True))

    def pickle(self, value: Any, stand_ins: Mapping[int, StandIn]) -> tuple[bytes, set[Any]]:
        """Return the pickle of a tree, and its classes (`Pickling.kinds`) except tensors'. Any thread. `stand_ins`:
        By id(), the placeholders of the tree's tensors. Raises one of `REFUSED`, as `Pickling.pickle` does.
        """
        try:
            out, kinds = self._dump(value, stand_ins)
        except NumpyScalarFound:
            out, kinds = self._dump(with_python_scalars(value), stand_ins)
        pickled = with_readable_empty_bytes(out)
        kinds.update(builtins_in(pickled))
        return pickled, kinds

    def _dump(self, value: Any, stand_ins: Mapping[int, StandIn]) -> tuple[bytes, set[Any]]:
        out = io.BytesIO()
        pickler = _FastPickler(out, self._protocol, stand_ins)
        try:
            pickler.dump(value)
        finally:
            pickler.break_cycle()
        return out.getvalue(), pickler.kinds


def _reusable_reduction(job: Pickling, tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return how `tensor` was pickled, without references to the tensor; None if that cannot be reused."""
    function, (on, *rest) = job.reduced.get(id(tensor), (tensor, (None, (None,))))[1]
    # torch pickles hooks as an empty dict; computing its reduction each time would be slow.
    rest = [_Reduced((OrderedDict, ())) if type(one) is OrderedDict and not one else one for one in rest]
    if function is _rebuild_parameter:
        inner = _reusable_reduction(job, on)
        return None if inner is None else (function, (_Reduced(inner), *rest))
    if function in (_rebuild_tensor_v2, _rebuild_tensor_v3) and id(on) in job.persistent_ids:
        return function, (_StorageStandIn(job.persistent_ids[id(on)][1]), *rest)
    return None


# A pickler calls `persistent_id` for every value, down to each number and string. This one returns None from C code,
# which is much faster than a Python function.
_never_persistent = cast(Callable[[Any], Any], deque[Any](maxlen=0).append)


class _FastPickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, protocol: int, stand_ins: Mapping[int, StandIn]) -> None:
        super().__init__(out, protocol)
        self.kinds: set[Any] = set()
        self._stand_ins = stand_ins
        self._real_persistent_id = self._persistent_id
        self.persistent_id = _never_persistent  # type: ignore[method-assign]

    def break_cycle(self) -> None:
        """Drop the reference to itself, which would keep the pickled values alive until a garbage collection."""
        self.persistent_id = _never_persistent  # type: ignore[method-assign]
        del self._real_persistent_id

    def reducer_override(self, value: Any) -> Any:
        if type(value) is _Reduced:
            return value.reduction
        stand_in = value if type(value) is StandIn else self._stand_ins.get(id(value))
        if stand_in is not None:
            self.persistent_id = self._real_persistent_id  # type: ignore[method-assign]
            return stand_in.reduction
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            raise pickle.PicklingError("a tensor that the survey has not found")
        if is_scalar(value):
            raise NumpyScalarFound
        self.kinds.add(kind_of(value))
        return NotImplemented

    def _persistent_id(self, value: Any) -> Any:
        if type(value) is not _StorageStandIn:
            return None
        self.persistent_id = _never_persistent  # type: ignore[method-assign]
        return value.persistent_id


class RecognisedTree(NamedTuple):
    """The contents of a recognised tree, and the storages of all its tensors except stand-ins, in its order."""

    contents: TreeContents
    storages: list[torch.UntypedStorage]


class LastPickle(NamedTuple):
    """Size of the last pickle of a snapshot, and its `Snapshot.text_length`."""

    pickle_bytes: int
    text_length: int


class _Place(NamedTuple):
    entry: int
    storage: int  # among those of `RecognisedTree`
    start_bytes: int
    nbytes: int
    device: torch.device


class Recall:
    """The findings about one tree. Training thread, except `pickle_snapshot`. Keeps no tensor and no storage alive."""

    def __init__(
        self,
        outline: Outline,
        facts: TensorFacts,
        places: list[_Place],
        ready: FastPickling | None,
        entries: tuple[int, ...],
        asked: tuple[int, ...],
    ) -> None:
        self._outline, self._facts, self._fast_pickling = outline, facts, ready
        self._columns = tuple(zip(*places, strict=True)) or ((),) * len(_Place._fields)
        self._empty = [number for number, place in enumerate(places) if not place.nbytes]
        self._checked = asked  # places of all tensors but stand-ins
        self.entries = entries  # of the layout, for each tensor of `RecognisedTree.contents`
        self._constants: ConstantContainers | None = None
        self.last_pickle = LastPickle(0, 0)
        self.is_valid = True  # False: invalid, `recognise` recognises no tree any more. Any thread

    @classmethod
    def of(
        cls,
        tree: Mapping[str, Any],
        found: Survey,
        storage_entries: Sequence[int],
        *,
        leave_out: Collection[int],
        stand_ins: Collection[int],
        pickled: tuple[Pickling, bytes] | None,
    ) -> Recall | None:
        """Keep the findings about `tree`; None if each capture of such a tree must be a full one.

        `storage_entries`: Storage number to entry of the layout. `leave_out`: Entries that are not copied from a
        storage. `stand_ins`: Entries of stand-ins, which the caller keeps unchanged: their bytes are copied from
        elsewhere, and `recognise` does not check them. `pickled`: The job that pickled the tree, and the pickle; None
        on ranks other than 0.
        """
        outlined = Outline.of(tree)
        if outlined is None:
            return None
        outline, contents = outlined
        tensors = contents.tensors
        if len(tensors) != len(found.specs) or not all(id(tensor) in found.paths for tensor in tensors):
            return None
        places: dict[int, _Place] = {}
        entries: list[int] = []
        asked: list[int] = []
        for index, tensor in enumerate(tensors):
            number = found.number(tensor)
            assert number is not None, "all tensors were surveyed"
            entry, part = storage_entries[number], found.parts[number]
            entries.append(entry)
            if entry in stand_ins:
                continue
            if entry not in leave_out:
                place = _Place(entry, len(asked), part.start_bytes, part.nbytes, part.storage.device)
                places.setdefault(entry, place)
            asked.append(index)
        facts = TensorFacts.of([*map(tensors.__getitem__, asked)])
        if facts is None:
            return None
        ready = None if pickled is None else FastPickling.of(pickled[0], tensors)
        recall = cls(outline, facts, [*places.values()], ready, tuple(entries), tuple(asked))
        return recall if pickled is None or recall._matches_torch(tree, contents, *pickled) else None

    def recognise(self, tree: Mapping[str, Any]) -> RecognisedTree | None:
        """Return the tensors of `tree`, if only values differ from the tree given to `of`; else None."""
        contents = self._outline.walk(tree) if self.is_valid else None
        if contents is None:
            return None
        storages = self._facts.storages([*map(contents.tensors.__getitem__, self._checked)])
        return None if storages is None else RecognisedTree(contents, storages)

    def sources(self, seen: RecognisedTree, entries: int) -> list[StorageSource | None]:
        """Return where the bytes of each entry of the layout lie now."""
        sources: list[StorageSource | None] = [None] * entries
        of_entry, numbers, starts, sizes, devices = self._columns
        storages = [*map(seen.storages.__getitem__, numbers)]
        addresses = [*map(add, map(torch.UntypedStorage.data_ptr, storages), starts)]
        for place in self._empty:
            addresses[place] = 0
        # Not `StorageSource(…)`, which runs Python code for each.
        made = zip(of_entry, storages, starts, sizes, addresses, devices, strict=True)
        for entry, source in zip(of_entry, map(tuple.__new__, repeat(StorageSource), made), strict=True):
            sources[entry] = source
        return sources

    def pickle(self, tree: Mapping[str, Any], contents: TreeContents) -> tuple[bytes, set[Any]] | None:
        """Return the bytes of `Pickling.pickle`, and the classes of values; None if that must report an error."""
        resolve_pending(tree)
        ready = self._fast_pickling
        return None if ready is None else self._pickled(tree, ready.stand_ins(contents.tensors))

    def snapshot(self, tree: Mapping[str, Any], contents: TreeContents) -> Snapshot | None:
        """Copy the tree as it is now; None if a copy of its containers may lose something."""
        if self._fast_pickling is None or self._constants is None or not contents.is_exact:
            return None
        known: dict[int, Any] = {
            **self._fast_pickling.stand_ins(contents.tensors),
            **self._constants.replacements(contents.containers),
        }
        return snapshot(tree, known)

    def pickle_snapshot(self, taken: Snapshot) -> tuple[bytes, set[Any]] | None:
        """As `pickle`, of a snapshot. Any thread."""
        resolve_pending(taken.tree)  # in place, because the copy belongs to the snapshot
        return self._pickled(taken.tree, {})

    def _pickled(self, tree: Any, stand_ins: Mapping[int, StandIn]) -> tuple[bytes, set[Any]] | None:
        assert self._fast_pickling is not None
        try:
            return self._fast_pickling.pickle(tree, stand_ins)
        except REFUSED:
            return None

    def _matches_torch(
        self, tree: Mapping[str, Any], contents: TreeContents, job: Pickling, expected: bytes
    ) -> bool:
        """Whether this recall pickles the tree as torch did. Snapshots are enabled only if theirs is the same, too."""

        def same(again: tuple[bytes, set[Any]] | None) -> bool:
            return again is not None and again[0] == expected and again[1] <= job.kinds

        if not same(self.pickle(tree, contents)):
            return False
        assert self._fast_pickling is not None
        if self._outline.is_plain:
            with contextlib.suppress(ValueError):
                self._constants = ConstantContainers(
                    contents.containers, self._fast_pickling.stand_ins(contents.tensors)
                )
        taken = self.snapshot(tree, contents)
        if taken is not None and same(self.pickle_snapshot(taken)):
            self.last_pickle = LastPickle(len(expected), taken.text_length)
        else:
            self._constants = None
        return True
