"""Stands for the split tensors of a tree while a file is laid out: whole tensors, of which no byte is ever touched.

    {"w": DTensor, rows 4 to 8 of 16}  ─►  {"w": stand-in of 16 rows}  +  w: region [4:8, …], its local tensor

torch pickles the stand-ins as the whole tensors that the file will hold. They take address space, and no memory. A plan
keeps them, so that a later save finds the same ones in its tree; what this rank sends is taken from the local tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.image.entries import SPLIT
from holdfast.image.regions import Region
from trainer_side.state.containers import children, with_changes
from trainer_side.state.dtensor_places import DTensorPlaces
from trainer_side.state.split_tensor import Held, StagePart, hand_split, held, is_split, live_of, local_of
from trainer_side.state.survey import StorageSource
from trainer_side.state.tree import Ownership


class _Mark(NamedTuple):
    """What must be the same at a later save for a region to be the same. Cheap to look at."""

    mesh: object
    placements: object
    shape: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> _Mark:
        if isinstance(value, StagePart):
            if is_split(value.value):
                return cls.of(value.value)
            return cls(None, value.is_here, value.shape, value.value.dtype, tuple(value.value.shape))
        split = hand_split(value)
        if split is not None:
            return cls(None, split.start, split.shape, split.tensor.dtype, tuple(split.tensor.shape))
        local = local_of(value)
        return cls(value.device_mesh, value.placements, tuple(value.shape), value.dtype, tuple(local.shape))


@dataclass(frozen=True)
class _KnownShard:
    mark: _Mark
    region: Region
    stand_in: torch.Tensor


class Expanded(NamedTuple):
    """A tree with whole tensors in place of the split ones.

    Attributes:
        tree: Containers without split tensors in them are those of the tree before.
        held: Path → what this rank holds.
        live: Path → the tensor of the state, in which torch counts the changes in place: of a DTensor, not in the one
            that is inside it.
    """

    tree: Any
    held: dict[str, Held]
    live: Mapping[str, torch.Tensor] = MappingProxyType({})


class Shards:
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
    def are_in(tree: Any) -> bool:
        seen: set[int] = set()
        pending = [tree]
        while pending:
            for _, value in children(pending.pop()):
                if is_split(value):
                    return True
                if isinstance(value, dict | list | tuple) and id(value) not in seen:
                    seen.add(id(value))
                    pending.append(value)
        return False

    def expand(self, tree: Any) -> Expanded:
        """Put stand-ins in place of all split tensors; for a plan, so they are new.

        Raises:
            StateError: One cannot be saved; names its path.
        """
        found: dict[str, Held] = {}
        live: dict[str, torch.Tensor] = {}
        by_memory: dict[tuple[object, ...], torch.Tensor] = {}

        def replace(path: str, value: Any) -> torch.Tensor:
            try:
                part = held(value)
            except StateError as error:
                raise StateError(f"{path} is {error}") from error
            assert part is not None, "it is split"
            found[path], live[path] = part, live_of(value)
            local = part.local
            memory: tuple[object, ...] = (path,)  # ties of a stage are not known to the other ranks
            if not isinstance(value, StagePart):
                storage = local.untyped_storage()._cdata
                memory = (storage, int(local.storage_offset()), part.shape, local.dtype)
            whole = by_memory.get(memory)
            if whole is None:
                whole = by_memory[memory] = torch.empty(part.shape, dtype=local.dtype, device="cpu")
                self._path_of[whole.untyped_storage()._cdata] = path
            else:
                whole = whole.detach()  # tied here, so tied in the file
            self._known[path] = _KnownShard(_Mark.of(value), part.region, whole)
            return whole

        expanded = Expanded(_replaced(tree, replace), found, live)
        self._remember(tree)
        return expanded

    def _remember(self, tree: Any) -> None:
        self._places = DTensorPlaces.of(tree, {path: known.stand_in for path, known in self._known.items()})

    def again(self, tree: Any) -> Expanded | None:
        """The same for a later tree; None if its split tensors are not those of the plan."""
        if self._places is not None and (seen := self._places.look(tree)) is not None:
            paths, new = self._places.paths, tuple.__new__  # `Held(…)` runs Python code for each
            of_plan = map(self._known.__getitem__, paths)
            parts = [
                new(Held, (known.mark.shape, known.region, local))
                for known, local in zip(of_plan, seen.local, strict=True)
            ]
            live = dict(zip(paths, seen.dtensors, strict=True))
            return Expanded(seen.tree, dict(zip(paths, parts, strict=True)), live)
        expanded = self._one_by_one(tree)
        if expanded is not None:
            self._remember(tree)
        return expanded

    def _one_by_one(self, tree: Any) -> Expanded | None:
        found: dict[str, Held] = {}
        live: dict[str, torch.Tensor] = {}

        class _OtherError(Exception):
            pass

        def replace(path: str, value: Any) -> torch.Tensor:
            known = self._known.get(path)
            try:
                if known is None or _Mark.of(value) != known.mark:
                    raise _OtherError
                live[path] = live_of(value)
            except StateError as error:
                raise _OtherError from error  # the new plan says it, with the path
            local = local_of(live[path]).detach()
            if type(local) is not torch.Tensor or not local.is_contiguous():
                raise _OtherError
            found[path] = Held(known.mark.shape, known.region, local)
            return known.stand_in

        try:
            expanded = Expanded(_replaced(tree, replace), found, live)
        except _OtherError:
            return None
        return expanded if found.keys() == self._known.keys() else None

    def own(
        self,
        classes: Mapping[int, Ownership],
        expanded: Expanded,
        patterns: Mapping[str, int],
    ) -> dict[int, Ownership]:
        """As `classes`, with the stand-ins: split, and copied behind the gate where their local tensor is.

        Args:
            classes: By address of a storage; of local tensors, too.
            expanded: What `expand` gave.
            patterns: Path → number of its pattern. A tensor without elements has none, and is rank 0's.
        """
        owned = dict(classes)
        for storage, path in self._path_of.items():
            local = expanded.held[path].local
            before = classes.get(local.untyped_storage()._cdata)
            number = patterns.get(path)
            if number is None and expanded.held[path].whole_numel:
                raise StateError(f"{path} is split among the ranks, and they have not agreed how; save again")
            owner = 0 if number is None else SPLIT - number
            owned[storage] = Ownership(owner, gated=before is not None and before.gated)
        return owned

    def sources(
        self, expanded: Expanded, storage_entries: Mapping[int, int]
    ) -> dict[int, StorageSource | None]:
        """Entry of the layout → where what this rank holds of it lies.

        Args:
            expanded: Of the save.
            storage_entries: Address of a stand-in's storage → entry.
        """
        found: dict[int, StorageSource | None] = {}
        new = tuple.__new__  # as in `again`
        for address, path in self._path_of.items():
            local, entry = expanded.held[path].local, storage_entries[address]
            start_bytes, nbytes = local.storage_offset() * local.itemsize, local.nbytes
            place = (entry, local.untyped_storage(), start_bytes, nbytes, local.data_ptr(), local.device)
            found[entry] = new(StorageSource, place) if nbytes else None
        return found

    def live(self, expanded: Expanded, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`tensors` of the expanded tree, with those of the state in place of stand-ins."""
        live = {id(known.stand_in): expanded.live[path] for path, known in self._known.items()}
        return [live.get(id(tensor), tensor) for tensor in tensors]


def _replaced(tree: Any, replace: Any, path: str = "") -> Any:
    """`tree` with other values in place of split tensors; containers in which nothing changes are kept."""
    done: dict[int, Any] = {}

    def of(node: Any, prefix: str) -> Any:
        if id(node) in done:
            return done[id(node)]
        done[id(node)] = node  # one that holds itself is found, and refused, elsewhere
        changed: dict[Any, Any] = {}
        for key, value in children(node):
            at = f"{prefix}{key}"
            if is_split(value):
                changed[key] = replace(at, value)
            elif isinstance(value, dict | list | tuple):
                other = of(value, f"{at}/")
                if other is not value:
                    changed[key] = other
        if changed:
            done[id(node)] = with_changes(node, changed)
        return done[id(node)]

    return of(tree, path)
