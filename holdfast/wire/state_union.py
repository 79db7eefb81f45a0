"""The union of states whose tensors differ between ranks (pipeline stages, for example), as one tree.

    rank 0   {net: {layers.0: t}}                     ┐            {net: {layers.0: t, layers.1: t}}
    rank 1   {net: {layers.1: t}}   rank 2: the same  ┴─ united ─► rank 0 pickles it, holders send the tensors

Each rank's PROPOSE has its containers, and the place of each tensor of its table (`Stage`). Rank 0's tree comes first,
in its own order; names that it lacks are added at the end of their container, in the order of the ranks. A plain value
that rank 0 lacks is refused: rank 0 writes the pickle, and would not learn of later changes to such a value.

Pure. An outline is JSON: a row of the table (a tensor), null (a plain value), `["l", [outline, …]]`, or
`["d", [[key, outline], …], {module: {name: value}}]`, whose last part are the versions that torch keeps beside a
module's state.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import ProtocolError, StateError

DEPTH_MAX = 100  # of containers within each other
_NAMED_MAX = 5

_Outline = Any


@dataclass(frozen=True)
class Stage:
    """One rank's tree, if the trees differ. `groups`: optimizer → for each group, parameter names and settings."""

    outline: _Outline
    groups: Mapping[str, Sequence[tuple[Sequence[str], str]]]

    def to_json(self) -> dict[str, Any]:
        return {"outline": self.outline, "groups": self.groups}

    @classmethod
    def from_json(cls, document: Any) -> Stage:
        """Read `to_json`; `unite_trees` checks the outline. Raises `ProtocolError`."""
        try:
            groups = {
                str(name): [([str(one) for one in names], str(settings)) for names, settings in of]
                for name, of in document["groups"].items()
            }
            return cls(document["outline"], groups)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"PROPOSE: a stage that cannot be read: {error}") from error


@dataclass(frozen=True)
class StateUnion:
    """The tree of the file, the same for all ranks."""

    table: list[list[Any]]  # rows `[path, dtype, shape, owner]` of all tensors, in the order of the file
    staged: frozenset[int]  # rows of tensors that not every rank has
    outline: _Outline  # as in `Stage`, with rows of this table
    groups: Mapping[str, list[list[str]]]  # optimizer → parameter names of each group

    def to_json(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "staged": sorted(self.staged),
            "outline": self.outline,
            "groups": self.groups,
        }

    @classmethod
    def from_json(cls, document: Any) -> StateUnion:
        """Read `to_json`. Raises `ProtocolError`."""
        try:
            table, staged = document["table"], frozenset(document["staged"])
            groups = {
                str(name): [list(map(str, names)) for names in of] for name, of in document["groups"].items()
            }
            rows = [leaf.row for leaf in _leaves(_parse_outline(document["outline"], len(table)))]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"RESERVED: a union that cannot be read: {error}") from error
        if rows != list(range(len(table))) or not staged <= set(rows):
            raise ProtocolError(
                f"RESERVED: the outline of a union names {len(rows)} rows, its table has {len(table)}"
            )
        return cls(table, staged, document["outline"], groups)


@dataclass
class _Dict:
    children: dict[Any, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Leaf:
    """A tensor."""

    row: int  # in the table of the rank that the tree belongs to
    path: str = ""


def unite_trees(
    tables: Sequence[Sequence[Sequence[Any]]], stages: Sequence[Stage]
) -> tuple[list[str], _Outline, dict[str, list[list[str]]]]:
    """Unite the trees of all ranks; return the paths in the order of the file, the outline, and the optimizers' groups.
    Raises `StateError`: trees do not fit; names rank and place; `ProtocolError`: an outline is malformed.
    """
    trees = []
    for rank, (table, stage) in enumerate(zip(tables, stages, strict=True)):
        paths = [str(row[0]) for row in table]
        _reject_duplicates(paths, f"rank {rank}")
        tree = _parse_outline(stage.outline, len(paths), paths)
        if [leaf.row for leaf in _leaves(tree)] != list(range(len(paths))):
            raise ProtocolError(
                f"PROPOSE: the outline of rank {rank} is not that of its {len(paths)} tensors"
            )
        trees.append(tree)
    union = trees[0]
    for rank, tree in enumerate(trees[1:], 1):
        _merge(union, tree, "", rank)
    order = [leaf.path for leaf in _leaves(union)]
    _reject_duplicates(order, "the ranks together")
    return order, _to_outline(union, iter(range(len(order)))), _unite_groups(stages)


def _reject_duplicates(paths: Sequence[str], who: str) -> None:
    if duplicate := _first_duplicate(paths):
        raise StateError(
            f"{who}: two tensors are named {duplicate}, and the ranks hold different tensors: give each a name of its "
            "own"
        )


def _first_duplicate(names: Sequence[str]) -> str:
    """The first name that occurs twice, or empty."""
    return next((name for name, times in Counter(names).items() if times > 1), "")


def _merge(union: Any, other: Any, where: str, rank: int) -> None:
    if isinstance(union, _Dict) and isinstance(other, _Dict):
        for key, node in other.children.items():
            at = f"{where}/{key}" if where else str(key)
            if key in union.children:
                _merge(union.children[key], node, at, rank)
            else:
                _reject_plain_values(node, at, rank)
                union.children[key] = node
        union.versions = {**other.versions, **union.versions}
    elif isinstance(union, list) and isinstance(other, list):
        if len(union) != len(other):
            raise StateError(
                f"rank {rank}: {where} is a list of {len(other)} with tensors, and has {len(union)} on rank 0; where "
                "the ranks hold different tensors, put them into a dict under the names of the whole model"
            )
        for number, (one, two) in enumerate(zip(union, other, strict=True)):
            _merge(one, two, f"{where}/{number}", rank)
    elif type(union) is not type(other):
        raise StateError(
            f"rank {rank}: {where} is {_describe_node(other)}, and on rank 0 {_describe_node(union)}"
        )


def _reject_plain_values(node: Any, where: str, rank: int) -> None:
    """Refuse plain values and lists under a key that rank 0 lacks: rank 0 can add only tensors in dicts."""
    found = [*_plain_values(node, where)]
    if found:
        more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
        raise StateError(
            f"rank {rank}: rank 0 does not have {', '.join(found[:_NAMED_MAX])}{more}, and cannot save a plain value "
            "(or a list) of another rank; make it a tensor, hand it over on rank 0 too, or put it into a PerRank(...)"
        )


def _plain_values(node: Any, where: str) -> Iterator[str]:
    if node is None or isinstance(node, list):
        yield where
    elif isinstance(node, _Dict):
        for key, child in node.children.items():
            yield from _plain_values(child, f"{where}/{key}")


def _unite_groups(stages: Sequence[Stage]) -> dict[str, list[list[str]]]:
    united: dict[str, list[list[str]]] = {}
    first = stages[0].groups
    for rank, stage in enumerate(stages):
        if stage.groups.keys() != first.keys():
            raise StateError(
                f"rank {rank} hands over the optimizers {sorted(stage.groups)}, and rank 0 {sorted(first)}; every rank "
                "hands over an optimizer of its own parameters under the same name"
            )
        for name, groups in stage.groups.items():
            if len(groups) != len(first[name]):
                raise StateError(
                    f"rank {rank}: {name} has {len(groups)} groups of parameters, and {len(first[name])} on rank 0; "
                    "give each rank the same groups, some of them without parameters"
                )
            known = united.setdefault(name, [[] for _ in groups])
            for number, (names, settings) in enumerate(groups):
                if settings != first[name][number][1]:
                    raise StateError(
                        f"rank {rank}: group {number} of {name} has the settings {settings}, and "
                        f"{first[name][number][1]} on rank 0; a checkpoint has one of each"
                    )
                seen = set(known[number])
                known[number] += [one for one in names if one not in seen]
    for name, of in united.items():
        if duplicate := _first_duplicate([one for names in of for one in names]):
            raise StateError(f"{name}: parameter {duplicate} is in another group on another rank")
    return united


def _parse_outline(outline: Any, rows: int, paths: Sequence[str] = (), depth: int = 0) -> Any:
    """Parse an outline, which is untrusted input. Raises `ProtocolError`."""
    if outline is None:
        return None
    if type(outline) is int and 0 <= outline < rows:
        return _Leaf(outline, paths[outline] if paths else "")
    if isinstance(outline, list) and outline and depth < DEPTH_MAX:
        if outline[0] == "l" and len(outline) == 2 and isinstance(outline[1], list):
            return [_parse_outline(one, rows, paths, depth + 1) for one in outline[1]]
        if outline[0] == "d" and len(outline) == 3 and isinstance(outline[1], list):
            children = {}
            for pair in outline[1]:
                if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)):
                    raise ProtocolError(
                        f"an outline with {pair!r:.80}, expected a key and what it stands for"
                    )
                children[pair[0]] = _parse_outline(pair[1], rows, paths, depth + 1)
            if isinstance(outline[2], dict) and len(children) == len(outline[1]):
                return _Dict(children, outline[2])
    raise ProtocolError(
        f"an outline with {outline!r:.80}, expected a row, null, or a list or dict of outlines"
    )


def _leaves(node: Any) -> Iterator[_Leaf]:
    if isinstance(node, _Leaf):
        yield node
    elif isinstance(node, _Dict | list):
        for child in node.children.values() if isinstance(node, _Dict) else node:
            yield from _leaves(child)


def _to_outline(node: Any, numbers: Iterator[int]) -> _Outline:
    if isinstance(node, _Leaf):
        return next(numbers)
    if isinstance(node, list):
        return ["l", [_to_outline(one, numbers) for one in node]]
    if isinstance(node, _Dict):
        return ["d", [[key, _to_outline(one, numbers)] for key, one in node.children.items()], node.versions]
    return None


def _describe_node(node: Any) -> str:
    if isinstance(node, _Dict):
        return f"a dict of {json.dumps([*node.children][:3])}"
    return {_Leaf: "a tensor", list: "a list with tensors"}.get(type(node), "a plain value")
