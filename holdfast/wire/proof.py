"""The proof of replicas, once for each agreement of the ranks: is what is saved once the same on every rank?

    rank 0   table  sums: w 91c0…  b 07aa…  moment 5e11…  ┐
    rank 1   table  sums: w 3f52…  b 07aa…  moment 77d0…  ┴─ PROPOSE ─► w and moment differ: refused, by name

State that is split among ranks by hand (ZeRO, tensor parallelism, pipeline stages, experts) has on each rank tensors of
the same names and shapes with other bytes; one copy of each in a file is the loss of all the others. So each rank sends
with its table a CRC-32 over every byte of every tensor, and no layout is agreed on before they were compared. What the
ranks may differ in afterwards is drift, and seen by samples (`replicas.py`).

Two kinds of tensor are compared. Replicated ones must be equal. All else is saved as rank 0 has it: what differs there
is only named (statistics of BatchNorm, random number generators), unless it is so much of the state that it must be a
part of a model: then it is refused, too.

Pure: no torch, no MPI, no clock.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import ProtocolError
from holdfast.image.entries import REPLICATED

# Of all numbers in the state. Below it are counters, generators and statistics; parts of a model are far above.
_SPLIT_FRACTION = 0.1
_NAMED_MAX = 5
_SIDES_MAX = 4
_RANKS_MAX = 8
_STATISTICS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)  # of BatchNorm, which each rank gathers by itself
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"})
_FLOATING = ("float", "bfloat", "complex")

_WAYS_OUT = (
    "If each rank has a part of larger tensors, hand over each part as Split(tensor, shape, start): the checkpoint has "
    "the whole tensors, and any number of ranks can resume them. If each rank is to keep its own, hand it over as "
    "PerRank(..., same_ranks=True): then every rank's is saved, and comes back on as many ranks. If the ranks are to "
    "be equal, bring them together before the first save: DistributedDataParallel does it for a model, "
    "torch.distributed.broadcast for a tensor"
)


def encode_sums(sums: Sequence[int]) -> bytes:
    """One CRC-32 for each row of the table, little-endian."""
    packed = array("I", sums)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def decode_sums(data: bytes, rows: int) -> array[int]:
    """Read what `encode_sums` made; none for no bytes.

    Raises:
        ProtocolError: It is not one sum for each of so many rows.
    """
    if data and len(data) != 4 * rows:
        raise ProtocolError(f"PROPOSE: {len(data)} bytes of checksums, expected 4 for each of {rows} rows")
    sums = array("I", data)
    if sys.byteorder == "big":
        sums.byteswap()
    return sums


@dataclass(frozen=True)
class Proven:
    """Result of the comparison.

    Attributes:
        refusal: Why nothing can be saved; empty if replicas are replicas.
        rank0_only: Paths of tensors of which other ranks hold other bytes than rank 0, whose are saved.
    """

    refusal: str
    rank0_only: tuple[str, ...]


def prove(table: Sequence[Sequence[Any]], sums: Mapping[int, Sequence[int]]) -> Proven:
    """Compare all ranks.

    Args:
        table: Rows `[path, dtype, shape, owner]`, the same on every rank.
        sums: rank → one checksum for each row; those of `PerRank` values are not looked at.
    """
    first, *others = (np.asarray(of, np.uint32) for of in sums.values())
    differs = np.zeros(len(first), bool)
    for other in others:
        differs |= other != first
    differ = [int(place) for place in np.flatnonzero(differs)]
    if not differ:
        return Proven("", ())
    split = [place for place in differ if table[place][3] == REPLICATED]
    rank0 = [place for place in differ if table[place][3] == 0 and table[place][1] != "bytes"]
    bulk = [place for place in rank0 if _may_be_a_part(table[place])]
    total = sum(map(_numbers, table))
    if sum(_numbers(table[place]) for place in bulk) > _SPLIT_FRACTION * total:
        split = sorted({*split, *bulk})
    if split:
        return Proven(_refusal(table, split, sums), ())
    return Proven("", tuple(str(table[place][0]) for place in rank0))


def is_statistic(path: str) -> bool:
    """Whether a tensor's name is that of BatchNorm's statistics, which differ between ranks by nature."""
    return path.endswith(_STATISTICS)


def _may_be_a_part(row: Sequence[Any]) -> bool:
    """Of a model or an optimizer."""
    path, dtype, shape, _ = row
    return str(dtype).startswith(_FLOATING) and math.prod(shape) > 1 and not is_statistic(path)


def _numbers(row: Sequence[Any]) -> int:
    return 0 if row[1] == "bytes" else math.prod(row[2])


def _refusal(table: Sequence[Sequence[Any]], split: Sequence[int], sums: Mapping[int, Sequence[int]]) -> str:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, crcs in sorted(sums.items()):
        groups.setdefault(tuple(crcs[place] for place in split), []).append(rank)
    sides = " and ".join(ranks_named(group) for group in [*groups.values()][:_SIDES_MAX])
    more = f" and {len(groups) - _SIDES_MAX} more groups" if len(groups) > _SIDES_MAX else ""
    paths = [str(table[place][0]) for place in split]
    return (
        f"what the ranks hold is not the same: {sides}{more} differ in {some(paths)} ({len(paths)} of {len(table)} "
        f"tensors). A checkpoint has one copy of each, so the others would be lost. {_likely(table, split)}. "
        f"{_WAYS_OUT}"
    )


def _likely(table: Sequence[Sequence[Any]], split: Sequence[int]) -> str:
    """Which parallelism that is, as far as names and shapes tell."""
    chosen = set(split)
    weights = [row for place, row in enumerate(table) if place in chosen and not _is_moment(row)]
    same = [
        row
        for place, row in enumerate(table)
        if place not in chosen and row[3] == REPLICATED and math.prod(row[2]) > 1 and not _is_moment(row)
    ]
    if not weights:
        return (
            "It looks like an optimizer whose state is partitioned among the ranks (ZeRO, DeepSpeed, FSDP1)"
        )
    if all("flat" in str(row[0]).lower() for row in weights):
        return "It looks like flat partitions, one for each rank (FSDP1, ZeRO, DeepSpeed)"
    if all(_names_an_expert(str(row[0])) for row in weights):
        return "It looks like expert parallelism: each rank has experts of its own"
    if not same:
        return (
            "It looks like pipeline stages whose tensors have the same names, like tensor parallelism, or like ranks "
            "that began with other weights (another seed, and no DistributedDataParallel)"
        )
    if any(len(row[2]) > 1 for row in weights) and all(len(row[2]) < 2 for row in same):
        return "It looks like tensor parallelism: each rank has a shard of the matrices"
    return "It looks like expert parallelism or tensor parallelism: some weights are each rank's own"


def _is_moment(row: Sequence[Any]) -> bool:
    path = str(row[0])
    return "/state/" in path or path.rpartition("/")[2] in _MOMENTS


def _names_an_expert(path: str) -> bool:
    return "expert" in path.lower() or "moe" in path.lower().replace("/", ".").split(".")


def some(paths: Sequence[str]) -> str:
    """The first paths, and how many more there are."""
    more = len(paths) - _NAMED_MAX
    return ", ".join(paths[:_NAMED_MAX]) + (f" and {more} more tensors" if more > 0 else "")


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2`, and how many more there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - _RANKS_MAX
    return f"ranks {', '.join(map(str, ranks[:_RANKS_MAX]))}" + (f" and {more} more" if more > 0 else "")
