"""The places of the DTensors in a tree, so that those of a later tree are found without Python code for each.

    {"w": DTensor, "opt": {0: {"m": DTensor}}}
    rows   (w, opt: DTensor, dict) · (0: dict) · (m: DTensor)        keys and classes, breadth first
    facts  spec (mesh, placements, shape, stride, dtype) of each DTensor; shape of its local tensor

FSDP2 gives a new DTensor for each parameter at each `state_dict()`, a thousand of them for a model of usual depth, and
a `save()` must know whether each still is the part that the plan was made for. Here loops that run in C compare them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from trainer_side.state.containers import with_changes
from trainer_side.state.outline import parts_of
from trainer_side.state.split_tensor import is_dtensor, is_split

_DICTS = frozenset({dict, OrderedDict})
_CONTAINERS = _DICTS | {list, tuple}

# A spec that is the same object, which it nearly always is, is compared without a call.
_facts = attrgetter("_spec", "shape", "dtype")
_local = attrgetter("_local_tensor")
_shape = attrgetter("shape")


class _Row(NamedTuple):
    """One container.

    Attributes:
        keys: Of its values; None: they are numbered.
        types: Of its values.
        dtensors, containers: The places of those in it.
        stand_ins: Key → what comes in the place of a DTensor.
        changed: Key → number of the row of a container in which, at any depth, something is replaced.
    """

    keys: tuple[Any, ...] | None
    types: tuple[type, ...]
    dtensors: tuple[int, ...]
    containers: tuple[int, ...]
    stand_ins: Mapping[Any, torch.Tensor]
    changed: dict[Any, int]


class FoundAgain(NamedTuple):
    """A later tree, with stand-ins in place of its DTensors; these and their local tensors, in the order of `paths`."""

    tree: Any
    dtensors: list[Any]
    local: list[torch.Tensor]


class DTensorPlaces:
    """See the module. It keeps nothing of the tree alive but keys and specs. Training thread.

    Attributes:
        paths: Of the DTensors.
    """

    def __init__(self, rows: Sequence[_Row], paths: Sequence[str], dtensors: Sequence[Any]) -> None:
        self._rows, self.paths = rows, tuple(paths)
        self._known = [*map(_facts, dtensors)]
        self._local_shapes = [*map(_shape, map(_local, dtensors))]

    @classmethod
    def of(cls, tree: Any, stand_ins: Mapping[str, torch.Tensor]) -> DTensorPlaces | None:
        """The places in a tree that was expanded.

        Args:
            tree: As it was before.
            stand_ins: Path → what came in the place of a split tensor.

        Returns:
            None if something in it is split in another way, or a container is at two places or of an unusual class:
            such a tree is looked at tensor by tensor.
        """
        rows: list[_Row] = []
        paths: list[str] = []
        dtensors: list[Any] = []
        nodes, prefixes = [tree], [""]
        parents: list[tuple[int, Any]] = [(-1, None)]
        for number, node in enumerate(nodes):  # grows
            if type(node) not in _CONTAINERS:
                return None
            keys, values = parts_of(node)
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

    def look(self, tree: Any) -> FoundAgain | None:
        """The DTensors of another tree; None if they may be other parts, or at other places."""
        nodes, dtensors = [tree], list[Any]()
        if type(tree) not in _CONTAINERS:
            return None
        for node, row in zip(nodes, self._rows, strict=False):  # grows
            keys, values = parts_of(node)
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
        return FoundAgain(self._replaced(nodes), dtensors, local)

    def _replaced(self, nodes: list[Any]) -> Any:
        done = nodes
        for number in reversed(range(len(self._rows))):  # what is in a container comes behind it
            row = self._rows[number]
            if row.stand_ins or row.changed:
                inner = {key: done[other] for key, other in row.changed.items()}
                done[number] = with_changes(
                    nodes[number], {**row.stand_ins, **inner} if inner else row.stand_ins
                )
        return done[0]


def _are_different(nodes: Sequence[Any]) -> bool:
    return len({*map(id, nodes)}) == len(nodes)
