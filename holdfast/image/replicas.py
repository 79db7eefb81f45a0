"""The replica check: do all ranks hold the same bytes of replicated tensors?

    rank 0   w: 91c0…  b: 07aa…  moment: 5e11…  ┐
    rank 1   w: 91c0…  b: 07aa…  moment: 5e11…  ├─ DONE ─► compare, tensor by tensor ─► rank 2 drifted in `b`
    rank 2   w: 91c0…  b: 3f52…  moment: 5e11…  ┘

A data-parallel run relies on replicas that are never compared: a flipped bit, a rank that missed an update, or a wrong
seed goes unnoticed, and a checkpoint is put together from ranks that disagree. Therefore each rank computes one CRC-32
for each *watched* entry, over bytes sampled at the saved instant (`fingerprint.py`), and sends them with DONE; the
stager compares them before it stages.

Watched entries are replicated entries that one tensor fills (bytes between tensors belong to no tensor), and sharded
entries with a region that several ranks hold, as in HSDP: the fingerprint of a rank's region is compared with those of
its other holders. Both sides derive the watched entries from the layout by the same rule, so only the CRCs are sent:
four bytes for each entry, as base64 in the JSON body: 5.4 MB for a million.

Samples rotate: every `stride`-th row of `ROW_BYTES`, beginning at a row that `first_row` draws from the step. All ranks
sample the same rows at a step, and over many steps every row is sampled.

Pure: no torch, no MPI, no clock.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from holdfast.errors import ProtocolError
from holdfast.image.entries import REPLICATED
from holdfast.image.layout import Layout
from holdfast.image.save_record import StepRecord

OnDivergence = Literal["warn", "refuse", "off"]

FIELD = "replicas"  # of DONE
ROW_BYTES = 64  # a cache line: reading one byte costs as much as reading all
_ROWS_MAX = 64  # of one entry, at one checkpoint
_NAMED_MAX = 5
_LAYOUTS_KEPT = 4
_GROUPS_MAX = 4
_RANKS_MAX = 8
_DRIFT_CHARACTERS_MAX = 4000
_WHOLE_BYTES_MAX = ROW_BYTES * _ROWS_MAX  # of an entry whose every row is sampled each time
_U64 = 2**64 - 1
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def watched_entries(layout: Layout) -> tuple[int, ...]:
    """Return the entries whose fingerprints are sent; those of `replicated_entries` come first."""
    filling: set[int] = set()
    for tensor in layout.tensors:
        # After the dtype may come other properties that must agree, such as strides.
        item_bytes = _ITEM_BYTES.get(tensor.dtype.partition(",")[0], 0)
        if 0 < math.prod(tensor.shape) * item_bytes == layout.entries[tensor.entry].nbytes:
            filling.add(tensor.entry)
    shared = (entry for entry in sorted(filling) if _is_shared(layout, entry))
    return (*replicated_entries(layout, filling), *shared)


def replicated_entries(layout: Layout, entries: Iterable[int]) -> tuple[int, ...]:
    """Return those of the entries that every rank holds whole, ascending."""
    return tuple(entry for entry in sorted(entries) if layout.entries[entry].owner == REPLICATED)


def _is_shared(layout: Layout, entry: int) -> bool:
    """Whether the entry is split, and several ranks hold the same region."""
    pattern = layout.pattern_of(layout.entries[entry])
    return pattern is not None and any(len(holders) > 1 for holders in pattern.holders)


def stride(nbytes: int) -> int:
    """Return the stride of the sampled rows in an entry of `nbytes`."""
    return max(1, -(-nbytes // (ROW_BYTES * _ROWS_MAX)))


def first_row(step: int, rows_apart: int) -> int:
    """Return the first row to sample at `step`; drawn, else saves every 1000 steps could sample the same rows."""
    mixed = (step * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _U64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _U64
    return (mixed ^ (mixed >> 31)) % rows_apart


def encode(crcs: Sequence[int]) -> str:
    """Encode the fingerprints of one rank, in the order of `watched_entries`, for the field `FIELD` of DONE."""
    return base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode()


def decode(text: Any, count: int) -> tuple[int, ...]:
    """Read the result of `encode` for `count` fingerprints. ProtocolError: it is something else."""
    if not isinstance(text, str):
        raise ProtocolError(f"DONE: {FIELD} is {type(text).__name__}, expected text")
    if len(text) != 4 * -(-4 * count // 3):
        raise ProtocolError(
            f"DONE: {FIELD} of {len(text)} characters, expected {count} fingerprints of 4 bytes"
        )
    try:
        data = base64.b64decode(text, validate=True)
        return struct.unpack(f"<{count}I", data)
    except (binascii.Error, ValueError, struct.error) as error:
        raise ProtocolError(f"DONE: {FIELD} is not base64 of {count} fingerprints: {error}") from error


def digest(text: str) -> str:
    """Return a short digest of the fingerprints of one rank."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def group_by_digest(digests: Mapping[int, str]) -> list[list[int]]:
    """Group the ranks with equal digests; ranks without a digest are left out."""
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(digests.items()):
        if value:
            groups.setdefault(value, []).append(rank)
    return [*groups.values()]


def drift_of(record: StepRecord, step: int) -> str:
    """Return why the replicas of a checkpoint differ; empty if no difference is known."""
    if record.drift:
        return record.drift[:_DRIFT_CHARACTERS_MAX]
    digests = {rank: one.replicas_digest or "" for rank, one in record.ranks.items()}
    return describe_drifted_groups(group_by_digest(digests), step)


def describe_drifted_groups(groups: Sequence[Sequence[int]], step: int) -> str:
    """Describe groups of ranks of which only the digests are known; empty unless there are two groups."""
    if len(groups) < 2:
        return ""
    sides = " and ".join(format_ranks(group) for group in groups[:_GROUPS_MAX])
    more = f" and {len(groups) - _GROUPS_MAX} more groups" if len(groups) > _GROUPS_MAX else ""
    return f"step {step}: replicas have drifted apart: {sides}{more} differ from each other"


@dataclass(frozen=True)
class Divergence:
    """Replicas that differ at one checkpoint."""

    step: int
    drifted: dict[int, list[str]]  # rank → paths of tensors in which it differs from most ranks
    # paths without a majority, so that it is unknown which ranks drifted → the groups of equal ranks
    undecided: dict[str, list[list[int]]]

    @property
    def message(self) -> str:
        """Name the ranks and tensors that differ, and the remedy."""
        parts = [
            f"rank {rank} differs from most ranks in {format_tensors(paths)}"
            for rank, paths in sorted(self.drifted.items())
        ]
        by_groups: dict[str, list[str]] = {}
        for path, groups in self.undecided.items():
            sides = " and ".join(format_ranks(group) for group in groups)
            by_groups.setdefault(sides, []).append(path)
        parts += [
            f"{sides} differ from each other in {format_tensors(paths)}" for sides, paths in by_groups.items()
        ]
        return (
            f"step {self.step}: replicas have drifted apart: {'; '.join(parts)}. They must hold the same bytes on "
            "every rank; restart from a checkpoint before it, and look at that VM, at seeds, and at updates outside "
            "DistributedDataParallel"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the event `divergence`."""
        return {
            "drifted": {str(rank): paths for rank, paths in sorted(self.drifted.items())},
            "undecided": self.undecided,
            "message": self.message,
        }


class ReplicaComparer:
    """The stager's knowledge of the replicas of one job. Not thread-safe."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[int, ...]] = {}
        self._reported: set[tuple[int, str]] = set()
        self._unresolved: dict[str, int] = {}  # path → step at which it drifted, if it may still differ

    def read(self, layout: Layout, text: Any) -> tuple[int, ...]:
        """Read one rank's fingerprints. Raises `ProtocolError` as `decode`."""
        return decode(text, len(self._entries(layout)))

    def compare(
        self, layout: Layout, step: int, fingerprints: Mapping[int, tuple[int, ...]]
    ) -> Divergence | None:
        """Compare the ranks that sent fingerprints; None if these are the same."""
        entries = self._entries(layout)
        if _all_equal(layout, entries, fingerprints) and not (self._unresolved and fingerprints):
            return None
        paths = {tensor.entry: tensor.path for tensor in reversed(layout.tensors)}  # of the first tensor
        drifted: dict[int, list[str]] = {}
        undecided: dict[str, list[list[int]]] = {}
        for place, entry in enumerate(entries):
            sides = [
                {rank: fingerprints[rank][place] for rank in ranks if rank in fingerprints}
                for ranks in _replica_groups(layout, entry)
            ]
            if all(len(set(values.values())) < 2 for values in sides):
                if layout.entries[entry].nbytes <= _WHOLE_BYTES_MAX and len(fingerprints) == layout.ranks:
                    self._unresolved.pop(paths[entry], None)  # the whole entry was compared, on every rank
                continue
            self._unresolved.setdefault(paths[entry], step)
            for values in sides:
                _attribute_drift(values, paths[entry], drifted, undecided)
        return Divergence(step, drifted, undecided) if drifted or undecided else None

    def describe_unresolved(self, step: int) -> str:
        """Describe tensors that drifted at an earlier step and are not proven equal since; empty without any."""
        if not self._unresolved:
            return ""
        return (
            f"step {step}: replicas have drifted apart at step {min(self._unresolved.values())}, in "
            f"{format_tensors([*self._unresolved])}, and a sample cannot show that they are equal again"
        )

    def is_new(self, divergence: Divergence) -> bool:
        """Whether the divergence has a rank and tensor that no earlier call had."""
        found = {(rank, path) for rank, paths in divergence.drifted.items() for path in paths}
        found |= {(-1, path) for path in divergence.undecided}
        news = not found <= self._reported
        self._reported |= found
        return news

    def _entries(self, layout: Layout) -> tuple[int, ...]:
        if layout.digest not in self._watched:
            while len(self._watched) >= _LAYOUTS_KEPT:
                del self._watched[next(iter(self._watched))]
            self._watched[layout.digest] = watched_entries(layout)
        return self._watched[layout.digest]


def _replica_groups(layout: Layout, entry: int) -> Sequence[Sequence[int]]:
    """Return the groups of ranks that hold the same bytes of an entry: all ranks, or the holders of each region."""
    pattern = layout.pattern_of(layout.entries[entry])
    return (range(layout.ranks),) if pattern is None else pattern.holders


def _all_equal(layout: Layout, entries: Sequence[int], fingerprints: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether all replicas are the same; fast, because they nearly always are."""
    if not layout.patterns or not fingerprints:
        return len(set(fingerprints.values())) < 2
    ranks = sorted(fingerprints)
    table = np.array([fingerprints[rank] for rank in ranks], np.uint32).reshape(len(ranks), len(entries))
    row_of = {rank: row for row, rank in enumerate(ranks)}
    places: dict[int, list[int]] = {}  # by owner: entries with the same split are compared together
    for place, entry in enumerate(entries):
        places.setdefault(layout.entries[entry].owner, []).append(place)
    for of_owner in places.values():
        for holders in _replica_groups(layout, entries[of_owner[0]]):
            rows = [row_of[rank] for rank in holders if rank in row_of]
            some = table[np.ix_(rows, of_owner)]
            if len(rows) > 1 and not (some == some[0]).all():
                return False
    return True


def _attribute_drift(
    values: Mapping[int, int],
    path: str,
    drifted: dict[int, list[str]],
    undecided: dict[str, list[list[int]]],
) -> None:
    """Record which ranks differ in a tensor, by majority; else in `undecided`. `values`: rank → fingerprint."""
    if len(set(values.values())) < 2:
        return
    groups: dict[int, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    most = max(groups.values(), key=len)
    if 2 * len(most) <= len(values):
        undecided.setdefault(path, []).extend(groups.values())
        return
    for rank in values.keys() - most:
        drifted.setdefault(rank, []).append(path)


def format_tensors(paths: Sequence[str]) -> str:
    """Name the first paths, and how many more there are."""
    more = len(paths) - _NAMED_MAX
    return ", ".join(paths[:_NAMED_MAX]) + (f" and {more} more tensors" if more > 0 else "")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2`, and how many more there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - _RANKS_MAX
    return f"ranks {', '.join(map(str, ranks[:_RANKS_MAX]))}" + (f" and {more} more" if more > 0 else "")
