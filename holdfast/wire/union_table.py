"""The table of a state whose tensors differ between ranks: its rows, their holders, and the checksums to compare.

    rank 0   net/a  net/b           ┐            net/a   held by rank 0          all of it, sent by rank 0
    rank 1   net/b  net/c (a shard) ┼─ united ─► net/b   on every rank           as in any other state
    rank 2   net/b  net/c (a shard) ┘            net/c   held by ranks 1 and 2   the shards that they hold

A tensor that only some ranks have counts as split: the other ranks hold no region of it. If a tensor may differ between
ranks (a buffer), the lowest rank's bytes are saved. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import StateError
from holdfast.image.entries import SPLIT
from holdfast.wire.state_messages import Proposal
from holdfast.wire.state_union import Stage, StateUnion, unite_trees


class UnionTable(NamedTuple):
    """Result of `union_of`."""

    union: StateUnion
    proof_table: list[list[Any]]  # the same table, with the owners that the holders have proposed
    # By rank, the checksum of each row; the first holder's if the rank does not have the tensor.
    sums: list[tuple[int, ...]]
    # For each split row, by rank, the number of the region that it holds; None if it does not have the tensor.
    held: dict[int, list[int | None]]
    makers: list[int]  # ranks with a tensor that no lower rank has, rank 0 included


def union_of(proposals: Sequence[Proposal], stages: Sequence[Stage]) -> UnionTable:
    """Unite the states of all ranks. Raises `StateError`: tensors or trees do not fit; `ProtocolError`: malformed."""
    paths, outline, groups = unite_trees([one.table for one in proposals], stages)
    rows = [{str(row[0]): number for number, row in enumerate(one.table)} for one in proposals]
    regions = [dict(one.held.rows) for one in proposals]
    table: list[list[Any]] = []
    proof: list[list[Any]] = []
    held: dict[int, list[int | None]] = {}
    staged, makers = set[int](), {0}
    places: list[list[int]] = [[] for _ in proposals]  # by rank: row of the union → its own row, or -1
    for number, path in enumerate(paths):
        own = [of.get(path, -1) for of in rows]
        holders = [rank for rank, row in enumerate(own) if row >= 0]
        first = holders[0]
        everywhere = len(holders) == len(own)
        row = proposals[first].table[own[first]]
        if not everywhere:
            # Drop strides and shared storage from the dtype: each such tensor gets a place of its own.
            row = [path, _dtype(row), *row[2:]]
        for rank in holders:
            other = proposals[rank].table[own[rank]]
            other = other if everywhere else [path, _dtype(other), *other[2:]]
            if other != row:
                raise StateError(
                    f"rank {rank}: tensor {path}: expected {_describe_row(row)} as on rank {first}, got "
                    f"{_describe_row(other)}; equal names stand for one tensor: name each layer as the whole model does"
                )
        split = row[3] == SPLIT
        if not everywhere:
            staged.add(number)
            makers.add(first)
            senders = holders if row[3] < 0 else [first]
            if 0 not in row[2]:
                held[number] = [
                    _region(regions[rank], own[rank], path, rank) if rank in senders else None
                    for rank in range(len(own))
                ]
        elif split:
            held[number] = [regions[rank][place] for rank, place in enumerate(own)]
        proof.append(list(row))
        table.append([*row[:3], SPLIT if number in held else row[3]])
        for rank, place in enumerate(own):
            places[rank].append(place)
    union = StateUnion(table, frozenset(staged), outline, groups)
    return UnionTable(union, proof, _sums(proposals, places), held, sorted(makers))


def _dtype(row: Sequence[Any]) -> str:
    return str(row[1]).partition(",")[0]


def _region(regions: Mapping[int, int], row: int, path: str, rank: int) -> int:
    if row not in regions:
        raise StateError(
            f"rank {rank}: {path} does not lie in one piece, and not every rank has it: make it contiguous()"
        )
    return regions[row]


def _sums(proposals: Sequence[Proposal], places: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    if not all(one.sums for one in proposals):
        return [() for _ in proposals]
    firsts = [
        next(proposals[rank].sums[own] for rank, own in enumerate(owns) if own >= 0)
        for owns in zip(*places, strict=True)
    ]
    return [
        tuple(one.sums[own] if own >= 0 else firsts[row] for row, own in enumerate(of))
        for one, of in zip(proposals, places, strict=True)
    ]


def _describe_row(row: Sequence[Any]) -> str:
    role = {-1: "replicated", SPLIT: "split"}.get(row[3], f"of rank {row[3]}")
    return f"({row[1]} {json.dumps(row[2])}, {role})"
