"""The proof of replicas, once for each agreement of the ranks: is each tensor that is saved once equal on every rank?

    rank 0   table  sums: w 91c0…  b 07aa…  moment 5e11…  ┐
    rank 1   table  sums: w 3f52…  b 07aa…  moment 77d0…  ┴─ PROPOSE ─► w and moment differ: refused, by name

State that is split among ranks by hand (ZeRO, tensor parallelism, pipeline stages, experts) has tensors of the same
names and shapes but other bytes on each rank; a file with one copy of each loses the others. Each rank therefore sends
with its table a CRC-32 over every byte of every tensor, and the sums are compared before the ranks agree on a layout.
Later differences between the ranks are drift, which samples detect (`replicas.py`).

Two kinds of tensor are compared. Replicated ones must be equal. The others are saved as rank 0 has them: differences
there are only reported (statistics of BatchNorm, random number generators), unless they make up so much of the state
that they must be parts of a model: then they are refused, too.

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
from holdfast.image.replicas import format_ranks, format_tensors

# Fraction of all numbers in the state: counters, generators and statistics are below it, parts of a model far above.
_SPLIT_FRACTION = 0.1
_SIDES_MAX = 4
# Statistics of BatchNorm, which each rank collects by itself.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"})
_FLOATING = ("float", "bfloat", "complex")
_WRAPPERS = frozenset({"module", "_orig_mod"})  # DistributedDataParallel, AveragedModel; torch.compile

_WAYS_OUT = (
    "If each rank has a part of larger tensors, hand over each part as Split(tensor, shape, start): the checkpoint has "
    "the whole tensors, and any number of ranks can resume them. If each rank is to keep its own, hand it over as "
    "PerRank(..., same_ranks=True): then every rank's is saved, and comes back on as many ranks. If the ranks are to "
    "be equal, bring them together before the first save: DistributedDataParallel does it for a model, "
    "torch.distributed.broadcast for a tensor"
)


def encode_sums(sums: Sequence[int]) -> bytes:
    """One CRC-32 for each row of the table, little-endian."""
    return np.asarray(sums, "<u4").tobytes()


def decode_sums(data: bytes, rows: int) -> array[int]:
    """The inverse of `encode_sums`; `data` may be empty. Raises `ProtocolError`: not one sum for each of `rows`."""
    if data and len(data) != 4 * rows:
        raise ProtocolError(f"PROPOSE: {len(data)} bytes of checksums, expected 4 for each of {rows} rows")
    sums = array("I", data)
    if sys.byteorder == "big":
        sums.byteswap()
    return sums


@dataclass(frozen=True)
class ReplicaProof:
    """Result of the comparison."""

    refusal: str  # why the state cannot be saved; empty if all replicas are equal
    rank0_only: tuple[str, ...]  # paths of tensors that differ between ranks; rank 0's bytes are saved


def compare_replicas(table: Sequence[Sequence[Any]], sums: Mapping[int, Sequence[int]]) -> ReplicaProof:
    """Compare all ranks. `table`: rows `[path, dtype, shape, owner]`, as on each. `sums`: rank → one sum per row."""
    first, *others = (np.asarray(of, np.uint32) for of in sums.values())
    differs = np.zeros(len(first), bool)
    for other in others:
        differs |= other != first
    differ = [int(place) for place in np.flatnonzero(differs)]
    if not differ:
        return ReplicaProof("", ())
    split = [place for place in differ if table[place][3] == REPLICATED]
    rank0 = [place for place in differ if table[place][3] == 0 and table[place][1] != "bytes"]
    bulk = [place for place in rank0 if _may_be_model_part(table[place])]
    total = sum(map(_element_count, table))
    if sum(_element_count(table[place]) for place in bulk) > _SPLIT_FRACTION * total:
        split = sorted({*split, *bulk})
    if split:
        return ReplicaProof(_refusal_message(table, split, sums), ())
    return ReplicaProof("", tuple(str(table[place][0]) for place in rank0))


def is_statistic(path: str) -> bool:
    """Whether a tensor's name is that of BatchNorm's statistics, which differ between ranks by nature."""
    return path.endswith(_STATISTICS)


def _may_be_model_part(row: Sequence[Any]) -> bool:
    """Whether a tensor may belong to a model or an optimizer."""
    path, dtype, shape, _ = row
    return str(dtype).startswith(_FLOATING) and math.prod(shape) > 1 and not is_statistic(path)


def _element_count(row: Sequence[Any]) -> int:
    return 0 if row[1] == "bytes" else math.prod(row[2])


def _refusal_message(
    table: Sequence[Sequence[Any]], split: Sequence[int], sums: Mapping[int, Sequence[int]]
) -> str:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, crcs in sorted(sums.items()):
        groups.setdefault(tuple(crcs[place] for place in split), []).append(rank)
    sides = " and ".join(format_ranks(group) for group in [*groups.values()][:_SIDES_MAX])
    more = f" and {len(groups) - _SIDES_MAX} more groups" if len(groups) > _SIDES_MAX else ""
    paths = [str(table[place][0]) for place in split]
    why = _describe_late_copy(table, split) or f"{_guess_parallelism(table, split)}. {_WAYS_OUT}"
    return (
        f"what the ranks hold is not the same: {sides}{more} differ in {format_tensors(paths)} "
        f"({len(paths)} of {len(table)} tensors). A checkpoint has one copy of each, so the others would be lost. {why}"
    )


def _describe_late_copy(table: Sequence[Sequence[Any]], split: Sequence[int]) -> str:
    """Advice if only a copy differs that was made before the weights were equal (an EMA, a teacher); else empty."""
    chosen = set(split)
    equal = [row for place, row in enumerate(table) if place not in chosen and _may_be_model_part(row)]
    differing = [table[place] for place in split]
    originals = _originals_by_name(equal, differing) or _originals_by_shape(equal, differing)
    if not originals:
        return ""
    copied, original = str(differing[0][0]), originals[0]
    return (
        "It looks like a copy of a model that each rank made while its weights were still its own, such as an EMA "
        f"(AveragedModel), a target network or a teacher, made before DistributedDataParallel: {original} is the same "
        f"on every rank, and {copied}, its copy by name or shape, is not. Make the copy after "
        "DistributedDataParallel(model), or load the weights of the wrapped model into it before the first step"
    )


def _originals_by_name(equal: Sequence[Sequence[Any]], differing: Sequence[Sequence[Any]]) -> list[str]:
    """For each differing tensor the equal one of which it is a copy, by name; empty unless each has one."""
    by_end: dict[tuple[tuple[str, ...], tuple[int, ...]], str] = {}
    for row in equal:
        words = _name_parts(str(row[0]))
        for begin in range(1, len(words)):
            by_end.setdefault((words[begin:], tuple(row[2])), str(row[0]))
    found = []
    for path, _, shape, _ in differing:
        words = _name_parts(path)
        ends = ((begin, by_end.get((words[begin:], tuple(shape)))) for begin in range(1, len(words)))
        begin, original = next(((begin, one) for begin, one in ends if one is not None), (0, ""))
        place = _name_parts(original)[: begin - len(words)]
        if not begin or not _may_be_a_copy(path, words[:begin], place):
            return []
        found.append(original)
    return found


def _may_be_a_copy(path: str, copied: tuple[str, ...], original: tuple[str, ...]) -> bool:
    """Whether two parts of the state are two models, rather than layers, experts or moments of one model."""
    if _is_moment([path]) and "." not in path.rpartition("/")[2]:  # a name with a dot is a parameter's
        return False
    nested = copied[: len(original)] == original or original[: len(copied)] == copied
    numbered = copied[-1].isdigit() and original[-1].isdigit()
    inside_a_model = len(copied) > len(_name_parts(path.rpartition("/")[0])) + 1
    expert = _is_expert_name(".".join(copied)) and not _is_expert_name(".".join(original))
    return not (nested or numbered or inside_a_model or expert)


def _originals_by_shape(equal: Sequence[Sequence[Any]], differing: Sequence[Sequence[Any]]) -> list[str]:
    """As `_originals_by_name` for a list without names, whose shapes are those of one model, in any order."""
    places = {str(row[0]).rpartition("/")[0] for row in differing}
    if len(places) != 1 or not all(str(row[0]).rpartition("/")[2].isdigit() for row in differing):
        return []
    (place,) = places
    models: dict[str, list[Sequence[Any]]] = {}
    copied = [*differing]
    for row in equal:
        if str(row[0]).rpartition("/")[0] == place:
            copied.append(row)
        elif not _is_moment(row):
            models.setdefault(str(row[0]).partition("/")[0], []).append(row)
    shapes = sorted(list(row[2]) for row in copied)
    return next(
        ([str(rows[0][0])] for rows in models.values() if sorted(list(row[2]) for row in rows) == shapes), []
    )


def _name_parts(path: str) -> tuple[str, ...]:
    """The parts of a tensor's name, without the parts that wrappers add."""
    return tuple(word for word in path.replace("/", ".").split(".") if word not in _WRAPPERS)


def _guess_parallelism(table: Sequence[Sequence[Any]], split: Sequence[int]) -> str:
    """Guess the kind of parallelism from names and shapes."""
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
    if all(_is_expert_name(str(row[0])) for row in weights):
        return "It looks like expert parallelism: each rank has experts of its own"
    if not same:
        return (
            "It looks like pipeline stages whose tensors have the same names, like tensor parallelism, or like ranks "
            "that began with other weights (another seed, and no DistributedDataParallel)"
        )
    if any(len(row[2]) > 1 for row in weights) and all(len(row[2]) < 2 for row in same):
        return "It looks like tensor parallelism: each rank has a shard of the matrices"
    return (
        f"{same[0][0]} is the same on every rank, and {weights[0][0]} is not: perhaps each rank has weights of its own "
        "(expert parallelism or tensor parallelism), perhaps these were made or copied on each rank, and "
        "DistributedDataParallel never made them equal"
    )


def _is_moment(row: Sequence[Any]) -> bool:
    path = str(row[0])
    return "/state/" in path or path.rpartition("/")[2] in _MOMENTS


def _is_expert_name(path: str) -> bool:
    return "expert" in path.lower() or "moe" in path.lower().replace("/", ".").split(".")
