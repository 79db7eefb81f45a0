"""Full-size placeholders for split tensors and `PerRank` values while the layout is planned; their memory is untouched.

    {"w": DTensor, rows 4 to 8 of 16}  ─►  {"w": stand-in of 16 rows}  +  w: region [4:8, …], its local tensor

torch pickles the stand-ins as the whole tensors that the file will hold. They take address space, but no memory. A plan
keeps them, so that a later save finds the same ones in its tree; this rank sends bytes of its local tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.image.entries import SPLIT
from holdfast.image.regions import Region
from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_tensor import (
    HeldPart,
    StagePart,
    held_part_at,
    is_dtensor,
    is_split,
    live_of,
    local_of,
    manual_split,
)
from trainer_side.state.survey import StorageSource, keys_and_values
from trainer_side.state.tree import Ownership, children, containers, with_changes, with_replacements

_DICTS = frozenset({dict, OrderedDict})
_CONTAINERS = _DICTS | {list, tuple}

# The spec is nearly always the same object, and then compares without a call.
_facts = attrgetter("_spec", "shape", "dtype")
_local = attrgetter("_local_tensor")
_shape = attrgetter("shape")


class _Row(NamedTuple):
    keys: tuple[Any, ...] | None  # of its values; None for a list or a tuple
    types: tuple[type, ...]
    dtensors: tuple[int, ...]  # places of the DTensors in it
    containers: tuple[int, ...]  # places of the containers in it
    stand_ins: Mapping[Any, torch.Tensor]  # key → the stand-in of the DTensor there
    changed: dict[Any, int]  # key → row of a container in which a value is replaced, at any depth


class MatchedTree(NamedTuple):
    """A later tree with stand-ins in place of its DTensors; the DTensors and local tensors, in the order of `paths`."""

    tree: Any
    dtensors: list[Any]
    local: list[torch.Tensor]


class DTensorPlaces:
    """Places of the DTensors in a tree, to find those of a later tree without Python code for each.

        {"w": DTensor, "opt": {0: {"m": DTensor}}}
        rows   (w, opt: DTensor, dict) · (0: dict) · (m: DTensor)        keys and classes, breadth first
        facts  spec (mesh, placements, shape, stride, dtype) of each DTensor; shape of its local tensor

    FSDP2 makes a new DTensor for each parameter at each `state_dict()`, and `save()` must check that each still is the
    planned part. Loops that run in C compare them. Keeps only keys and specs of the tree alive. Training thread.
    """

    def __init__(self, rows: Sequence[_Row], paths: Sequence[str], dtensors: Sequence[Any]) -> None:
        self._rows, self.paths = rows, tuple(paths)
        self._known = [*map(_facts, dtensors)]
        self._local_shapes = [*map(_shape, map(_local, dtensors))]

    @classmethod
    def of(cls, tree: Any, stand_ins: Mapping[str, torch.Tensor]) -> DTensorPlaces | None:
        """Return the places in an expanded tree. `stand_ins`: Path → stand-in of a split tensor. None if a tensor is
        split in another way, or a container is at two places or of an unusual class: it is checked tensor by tensor.
        """
        rows: list[_Row] = []
        paths: list[str] = []
        dtensors: list[Any] = []
        nodes, prefixes = [tree], [""]
        parents: list[tuple[int, Any]] = [(-1, None)]
        for number, node in enumerate(nodes):  # grows
            if type(node) not in _CONTAINERS:
                return None
            keys, values = keys_and_values(node)
            of_dtensors, of_containers, mine = [], [], {}
            for place, value in enumerate(values):
                key = place if keys is None else keys[place]
                path = f"{prefixes[number]}{key}"
                if is_dtensor(value):
                    of_dtensors.append(place)
                    mine[key] = stand_ins[path]
                    paths.append(path)
                    dtensors.append(value)
                elif is_split(value):
                    return None
                elif isinstance(value, dict | list | tuple):
                    of_containers.append(place)
                    nodes.append(value)
                    prefixes.append(f"{path}/")
                    parents.append((number, key))
            types = tuple(map(type, values))
            rows.append(_Row(keys, types, tuple(of_dtensors), tuple(of_containers), mine, {}))
        if not dtensors or not _are_different(nodes):
            return None
        for number in reversed(range(1, len(rows))):
            parent, key = parents[number]
            if rows[number].stand_ins or rows[number].changed:
                rows[parent].changed[key] = number
        return cls(rows, paths, dtensors)

    def match(self, tree: Any) -> MatchedTree | None:
        """Find the DTensors of another tree; None if they may be other parts, or at other places."""
        nodes, dtensors = [tree], list[Any]()
        if type(tree) not in _CONTAINERS:
            return None
        for node, row in zip(nodes, self._rows, strict=False):  # grows
            keys, values = keys_and_values(node)
            if keys != row.keys or tuple(map(type, values)) != row.types:
                return None
            dtensors.extend(map(values.__getitem__, row.dtensors))
            nodes.extend(map(values.__getitem__, row.containers))
        if not _are_different(nodes) or [*map(_facts, dtensors)] != self._known:
            return None
        local = [*map(_local, dtensors)]
        if {*map(type, local)} != {torch.Tensor} or [*map(_shape, local)] != self._local_shapes:
            return None
        if not all(map(torch.Tensor.is_contiguous, local)):
            return None
        return MatchedTree(self._replaced(nodes), dtensors, local)

    def _replaced(self, nodes: list[Any]) -> Any:
        done = nodes
        for number in reversed(range(len(self._rows))):  # inner containers come after outer ones
            row = self._rows[number]
            if row.stand_ins or row.changed:
                inner = {key: done[other] for key, other in row.changed.items()}
                done[number] = with_changes(
                    nodes[number], {**row.stand_ins, **inner} if inner else row.stand_ins
                )
        return done[0]


def _are_different(nodes: Sequence[Any]) -> bool:
    return len({*map(id, nodes)}) == len(nodes)


class _ShardKey(NamedTuple):
    """If these fields are unchanged at a later save, so is the rank's region. Cheap to compare."""

    mesh: object
    placements: object
    shape: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> _ShardKey:
        if isinstance(value, StagePart):
            if is_split(value.value):
                return cls.of(value.value)
            return cls(None, value.is_present, value.shape, value.value.dtype, tuple(value.value.shape))
        split = manual_split(value)
        if split is not None:
            return cls(None, split.start, split.shape, split.tensor.dtype, tuple(split.tensor.shape))
        local = local_of(value)
        return cls(value.device_mesh, value.placements, tuple(value.shape), value.dtype, tuple(local.shape))


@dataclass(frozen=True)
class _KnownShard:
    key: _ShardKey
    region: Region
    stand_in: torch.Tensor


class ExpandedTree(NamedTuple):
    """A tree with whole tensors in place of the split ones."""

    tree: Any  # containers without split tensors are the original objects
    held: dict[str, HeldPart]  # path → what this rank holds
    # Path → the state's tensor, in which torch counts in-place changes: a DTensor, not its local tensor.
    live: Mapping[str, torch.Tensor] = MappingProxyType({})


class SplitStandIns:
    """The stand-ins of one plan. Training thread."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownShard] = {}
        self._path_of: dict[int, str] = {}  # a storage's address → its first path
        self._places: DTensorPlaces | None = None

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def storages(self) -> list[int]:
        return [*self._path_of]

    @staticmethod
    def has_split(tree: Any) -> bool:
        return any(is_split(value) for _, node in containers(tree) for _, value in children(node))

    def expand(self, tree: Any) -> ExpandedTree:
        """Put new stand-ins in place of all split tensors. StateError: one cannot be saved; names its path."""
        found: dict[str, HeldPart] = {}
        live: dict[str, torch.Tensor] = {}
        by_memory: dict[tuple[object, ...], torch.Tensor] = {}

        def replace(path: str, value: Any) -> Any:
            if not is_split(value):
                return value
            part = held_part_at(path, value)
            assert part is not None, "it is split"
            found[path], live[path] = part, live_of(value)
            local = part.local
            memory: tuple[object, ...] = (path,)  # other ranks do not know the ties of a stage
            if not isinstance(value, StagePart):
                storage = local.untyped_storage()._cdata
                memory = (storage, int(local.storage_offset()), part.shape, local.dtype)
            whole = by_memory.get(memory)
            if whole is None:
                whole = by_memory[memory] = torch.empty(part.shape, dtype=local.dtype, device="cpu")
                self._path_of[whole.untyped_storage()._cdata] = path
            else:
                whole = whole.detach()  # tied here, so tied in the file
            self._known[path] = _KnownShard(_ShardKey.of(value), part.region, whole)
            return whole

        expanded = ExpandedTree(with_replacements(tree, replace), found, live)
        self._remember(tree)
        return expanded

    def _remember(self, tree: Any) -> None:
        self._places = DTensorPlaces.of(tree, {path: known.stand_in for path, known in self._known.items()})

    def expand_again(self, tree: Any) -> ExpandedTree | None:
        """Do as `expand` for a later tree; None if its split tensors are not those of the plan."""
        if self._places is not None and (seen := self._places.match(tree)) is not None:
            paths, new = self._places.paths, tuple.__new__  # `Held(…)` runs Python code for each
            of_plan = map(self._known.__getitem__, paths)
            parts = [
                new(HeldPart, (known.key.shape, known.region, local))
                for known, local in zip(of_plan, seen.local, strict=True)
            ]
            live = dict(zip(paths, seen.dtensors, strict=True))
            return ExpandedTree(seen.tree, dict(zip(paths, parts, strict=True)), live)
        expanded = self._expand_one_by_one(tree)
        if expanded is not None:
            self._remember(tree)
        return expanded

    def _expand_one_by_one(self, tree: Any) -> ExpandedTree | None:
        found: dict[str, HeldPart] = {}
        live: dict[str, torch.Tensor] = {}

        def replace(path: str, value: Any) -> Any:
            if not is_split(value):
                return value
            known = self._known.get(path)
            if known is None or _ShardKey.of(value) != known.key:
                raise StateError(f"{path} is another part than planned")
            live[path] = live_of(value)
            local = local_of(live[path]).detach()
            if type(local) is not torch.Tensor or not local.is_contiguous():
                raise StateError(f"{path} lies in another way than planned")
            found[path] = HeldPart(known.key.shape, known.region, local)
            return known.stand_in

        try:
            expanded = ExpandedTree(with_replacements(tree, replace), found, live)
        except StateError:
            return None  # the new plan reports any error
        return expanded if found.keys() == self._known.keys() else None

    def with_ownership(
        self, classes: Mapping[int, Ownership], expanded: ExpandedTree, patterns: Mapping[str, int]
    ) -> dict[int, Ownership]:
        """Return `classes` (ownership by address of a storage, local tensors included) with the stand-ins added: split,
        and gated like their local tensors. `patterns`: Path → number of its pattern. A tensor without elements has no
        pattern, and belongs to rank 0.
        """
        owned = dict(classes)
        for storage, path in self._path_of.items():
            local = expanded.held[path].local
            before = classes.get(local.untyped_storage()._cdata)
            number = patterns.get(path)
            if number is None and 0 not in expanded.held[path].shape:
                raise StateError(f"{path} is split among the ranks, and they have not agreed how; save again")
            owner = 0 if number is None else SPLIT - number
            owned[storage] = Ownership(owner, gated=before is not None and before.gated)
        return owned

    def sources(
        self, expanded: ExpandedTree, storage_entries: Mapping[int, int]
    ) -> dict[int, StorageSource | None]:
        """Map each entry of the layout to its bytes on this rank. `storage_entries`: Stand-in storage → entry."""
        found: dict[int, StorageSource | None] = {}
        new = tuple.__new__  # as in `expand_again`
        for address, path in self._path_of.items():
            local, entry = expanded.held[path].local, storage_entries[address]
            start_bytes, nbytes = local.storage_offset() * local.itemsize, local.nbytes
            place = (entry, local.untyped_storage(), start_bytes, nbytes, local.data_ptr(), local.device)
            found[entry] = new(StorageSource, place) if nbytes else None
        return found

    def live_tensors(self, expanded: ExpandedTree, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `tensors` of the expanded tree, with the state's tensors in place of stand-ins."""
        live = {id(known.stand_in): expanded.live[path] for path, known in self._known.items()}
        return [live.get(id(tensor), tensor) for tensor in tensors]


@dataclass(frozen=True)
class PerRankStandIns:
    """Stand-ins for the blobs of `PerRank` values: one tensor for each value and rank, of the size agreed on.

    state["rng"] = PerRank(…)  ─►  expanded["rng"] = [rank 0's blob, rank 1's blob, …]
    """

    by_name: Mapping[str, list[torch.Tensor]]

    @classmethod
    def of(cls, ranks: int, reserves: Mapping[str, int]) -> PerRankStandIns:
        return cls(
            {
                name: [torch.empty(reserve, dtype=torch.uint8, device="cpu") for _ in range(ranks)]
                for name, reserve in reserves.items()
            }
        )

    @property
    def paths(self) -> set[str]:
        return {f"{name}/{rank}" for name, tensors in self.by_name.items() for rank in range(len(tensors))}

    def expand(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tree with blobs in place of its `PerRank` values."""
        return {
            name: self.by_name[name] if isinstance(value, PerRank) else value for name, value in tree.items()
        }

    def with_ownership(self, classes: Mapping[int, Ownership]) -> dict[int, Ownership]:
        """Return `classes` with the blobs added: each belongs to its rank, and is copied at once."""
        owned = dict(classes)
        for tensors in self.by_name.values():
            for rank, tensor in enumerate(tensors):
                owned[tensor.untyped_storage()._cdata] = Ownership(rank, gated=False)
        return owned

    def entries(self, numbers: Mapping[int, int], storage_entries: tuple[int, ...]) -> dict[str, list[int]]:
        """Map each name to the layout's entries, by rank. `numbers`: Address of a storage → its number in a survey."""
        return {
            name: [storage_entries[numbers[tensor.untyped_storage()._cdata]] for tensor in tensors]
            for name, tensors in self.by_name.items()
        }
