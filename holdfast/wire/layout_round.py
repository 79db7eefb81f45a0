"""The ranks' agreement on a layout: all have the same tensors, and reserve the same room for values that may grow.

    PROPOSE of every rank ─► tables equal? ─ yes ─► replicas equal? ─ yes ─► RESERVED: the same reserves for all
                                 │                        └────────── no ──► REFUSED: which rank, which tensor, why
                                 ├─ other names ─► RESERVED asks ─► PROPOSE with stages ─► the same, for the union
                                 └─ else ────────────────────────────────────► REFUSED
    FITS or OFFER of a rank, for a step for which another proposes ───────────► REFUSED: only that rank has changed

If tensors differ between ranks, each is split among its holders, and the other ranks hold no region of it:

    rank 0   net/a  net/b           ┐            net/a   held by rank 0          all of it, sent by rank 0
    rank 1   net/b  net/c (a shard) ┼─ united ─► net/b   on every rank           as in any other state
    rank 2   net/b  net/c (a shard) ┘            net/c   held by ranks 1 and 2   the shards that they hold

Pure: proposals in, an answer out. One round is open at a time; a rank's second proposal in a round replaces its first.
The stager leads the round, or with local tiers the ranks' own council.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.image.entries import REPLICATED, SPLIT
from holdfast.image.regions import Pattern, unite
from holdfast.image.replicas import format_ranks
from holdfast.wire.frames import Frame, peer_error
from holdfast.wire.replica_proof import ReplicaProof, compare_replicas
from holdfast.wire.state_messages import Agreement, Proposal, ProposalReader
from holdfast.wire.state_union import Stage, StateUnion, unite_trees

_NAMED_MAX = 1000  # tensors in one message
_PAGE_BYTES = 4096
_PICKLE_RESERVE_UNIT_BYTES = 64 * 1024
_PATIENCE_SECONDS = 10.0  # before the log names the missing ranks
_STEPS_KNOWN = 16  # steps whose FITS are remembered: ranks are never many steps apart
_ALL_RANKS = (
    "Every rank must call step() or save(), each for its own part of the state: not inside `if rank == 0:`"
)


class OneSidedRound(NamedTuple):
    """The end of a round that only some ranks have begun: `ranks` get `error`, and `step` is given up."""

    ranks: tuple[int, ...]
    step: int
    error: HoldfastError


class LayoutRound:
    """Collects one proposal of each rank. `seconds_max`: deadline for the last proposal, from the first."""

    def __init__(self, ranks: int, seconds_max: float, *, leader: str = "the stager") -> None:
        self._ranks, self._seconds_max, self._leader = ranks, seconds_max, leader
        self._proposals: dict[int, Proposal] = {}
        self._reader = ProposalReader(2 * ranks)
        self._lost: dict[int, str] = {}  # rank → why it never proposes again
        # Step → ranks whose state fits the layout there
        self._fitting_ranks: OrderedDict[int, set[int]] = OrderedDict()
        self._begun_at = 0.0
        self._has_warned = False

    def read(self, frame: Frame) -> Proposal:
        """Read a proposal of this round. Raises `ProtocolError`: as `ProposalReader.read`."""
        return self._reader.read(frame)

    def propose(
        self, rank: int, proposal: Proposal, now: float
    ) -> Agreement | HoldfastError | OneSidedRound | None:
        """Take one rank's proposal; return the answer to all ranks, which ends the round. None: others are missing."""
        if not self._proposals:
            self._begun_at, self._has_warned = now, False
        self._proposals[rank] = proposal
        if self._lost:
            return self._end_for_lost_rank()
        if len(self._proposals) < self._ranks:
            return self._one_sided(proposal.step)
        proposals = self._end_round()
        if (refused := _first_refusal(proposals)) is not None:
            return refused
        try:
            return _agree([proposals[rank] for rank in range(self._ranks)])
        except (StateError, ProtocolError) as refusal:
            return refusal

    def record_fits(self, rank: int, step: int) -> OneSidedRound | None:
        """Note that a rank saves this step with its present layout, so it will not propose for the step."""
        self._fitting_ranks.setdefault(step, set()).add(rank)
        while len(self._fitting_ranks) > _STEPS_KNOWN:
            self._fitting_ranks.popitem(last=False)
        return self._one_sided(step) if self._proposals else None

    def _one_sided(self, step: int) -> OneSidedRound | None:
        """End the round if some ranks propose for this step and others never will. A rank that saves a step twice has
        fitted the first time, and does not count as changed.
        """
        fitting = self._fitting_ranks.get(step, set())
        alone = [rank for rank, one in self._proposals.items() if one.step == step and rank not in fitting]
        others = sorted(fitting - self._proposals.keys())
        if step < 0 or not alone or not others:
            return None
        proposals = self._end_round()
        first = proposals[min(alone)]
        proposers = format_ranks(sorted(alone))
        if first.refusal is not None:
            code, why = first.refusal
            error = peer_error(code, f"step {step}: {proposers}: {why}")
        else:
            error = StateError(
                f"step {step}: the state of {proposers} has changed, and that of {format_ranks(others)} has not: "
                f"{first.change or 'its tensors are others than before'}. All ranks must change their tensors, and how "
                "these are split, before the same save"
            )
        return OneSidedRound(tuple(proposals), step, error)

    def late_warning(self, now: float) -> str:
        """Return a warning that names the missing ranks, once in each round; empty otherwise."""
        if not self._proposals or self._has_warned or now - self._begun_at <= _PATIENCE_SECONDS:
            return ""
        self._has_warned = True
        return (
            f"{self._leader} has waited {_PATIENCE_SECONDS:g} s for the layout of {self._missing}, and gives up after "
            f"{self._seconds_max:g} s. {_ALL_RANKS}"
        )

    def expire(self, now: float) -> HoldfastError | None:
        """End the round with an answer to all ranks, if a rank has not proposed in time."""
        if not self._proposals or now - self._begun_at <= self._seconds_max:
            return None
        missing = self._missing
        self._end_round()
        return PeerLost(
            f"{self._leader} waited {self._seconds_max:g} s for the layout of {missing}; do all ranks save at the same "
            f"steps? {_ALL_RANKS}"
        )

    def record_lost(self, rank: int, reason: str, *, has_exited: bool = False) -> HoldfastError | None:
        """Note a lost rank; it ends this round and each later one. `has_exited`: the rank ended before this save."""
        self._lost.setdefault(rank, f"{reason}. {_ALL_RANKS}" if has_exited else reason)
        return self._end_for_lost_rank() if self._proposals else None

    @property
    def _missing(self) -> str:
        return format_ranks([rank for rank in range(self._ranks) if rank not in self._proposals])

    def _end_round(self) -> dict[int, Proposal]:
        """Begin the next round; return the proposals of this one."""
        proposals, self._proposals = self._proposals, {}
        self._reader.reset()
        return proposals

    def _end_for_lost_rank(self) -> HoldfastError:
        """End a round in which a rank is lost."""
        asked, why = format_ranks(sorted(self._proposals)), next(iter(self._lost.values()))
        self._end_round()
        return PeerLost(f"{asked} began a save, and the ranks cannot agree on a layout: {why}")


def _first_refusal(proposals: Mapping[int, Proposal]) -> HoldfastError | None:
    """The first refusal among the proposals, as the answer to all ranks; None if no rank refuses."""
    ranks_by_refusal: dict[tuple[str, str], list[int]] = {}
    for rank, proposal in sorted(proposals.items()):
        if proposal.refusal is not None:
            ranks_by_refusal.setdefault(proposal.refusal, []).append(rank)
    for (code, message), ranks in ranks_by_refusal.items():
        is_unanimous = len(ranks) == len(proposals)
        return peer_error(code, message if is_unanimous else f"{format_ranks(ranks)}: {message}")
    return None


def _agree(proposals: Sequence[Proposal]) -> Agreement:
    """Combine the proposals of all ranks. Raises `StateError`: they do not fit; `ProtocolError`: malformed."""
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        if first.per_rank_bytes.keys() != proposal.per_rank_bytes.keys():
            expected, got = sorted(first.per_rank_bytes), sorted(proposal.per_rank_bytes)
            raise StateError(f"rank {rank}: expected PerRank values {expected} as on rank 0, got {got}")
    stages = [proposal.stage for proposal in proposals if proposal.stage is not None]
    union, table, makers = None, first.table, [first]
    if len(stages) == len(proposals):
        united = union_of(proposals, stages)
        union, table, sums = united.union, united.proof_table, list[Sequence[int]](united.sums)
        region_numbers, members = united.held, list(range(len(proposals)))
        makers = [proposals[rank] for rank in united.makers]
    else:
        named = sorted(str(row[0]) for row in table)
        for other, proposal in enumerate(proposals):
            if proposal.table_digest == first.table_digest:
                if proposal.table is not first.table and proposal.table != first.table:
                    raise ProtocolError(f"rank {other}: PROPOSE: another table with the digest of rank 0's")
                continue
            if sorted(str(row[0]) for row in proposal.table) != named:
                return Agreement(0, {}, asks_stages=True)
            raise StateError(
                f"rank {other}: {describe_difference(first, proposal)}; every rank must hand over the same state. "
                "A model that is split among the ranks (shards, experts): hand over each rank's part as Split(tensor, "
                "shape, start), under the same names on all ranks"
            )
        sums = [proposal.sums for proposal in proposals]
        region_numbers, members = _by_group(proposals)
    is_compared = len(sums) > 1 and all(sums)
    proven = compare_replicas(table, dict(enumerate(sums))) if is_compared else ReplicaProof("", ())
    if proven.refusal:
        raise StateError(proven.refusal)
    patterns, split_rows = _build_patterns(table, proposals, region_numbers, members, sums)
    return Agreement(
        pickle_reserve_bytes=pickle_reserve_bytes(sum(maker.pickle_bytes for maker in makers)),
        per_rank_reserve_bytes={
            name: -(-max(proposal.per_rank_bytes[name] for proposal in proposals) // _PAGE_BYTES)
            * _PAGE_BYTES
            for name in first.per_rank_bytes
        },
        rank0_only=proven.rank0_only[:_NAMED_MAX],
        patterns=patterns,
        split_rows=split_rows,
        union=union,
    )


def _by_group(proposals: Sequence[Proposal]) -> tuple[dict[int, list[int | None]], list[int]]:
    """For each split row, the number of the region that each group holds; and the group of each rank. Ranks with equal
    `HeldRegions.rows` form a group; usually all ranks do.
    """
    groups: dict[tuple[tuple[int, int], ...], int] = {}
    by_identity: dict[int, int] = {}  # `ProposalReader` shares equal rows among ranks
    members = []
    for proposal in proposals:
        rows = proposal.held.rows
        if id(rows) not in by_identity:
            by_identity[id(rows)] = groups.setdefault(rows, len(groups))
        members.append(by_identity[id(rows)])
    region_numbers: dict[int, list[int | None]] = {
        of_groups[0][0]: [number for _, number in of_groups] for of_groups in zip(*groups, strict=True)
    }
    return region_numbers, members


def _build_patterns(
    table: Sequence[Sequence[Any]],
    proposals: Sequence[Proposal],
    region_numbers: Mapping[int, Sequence[int | None]],
    members: Sequence[int],
    sums: Sequence[Sequence[int]],
) -> tuple[tuple[Pattern, ...], tuple[tuple[int, int], ...]]:
    """The patterns of split tensors, and the pattern of each row. `region_numbers`: split row → the region of each
    group, or None. `members`: by rank, its group. `sums`: by rank, one for each row. Raises `StateError`: regions
    overlap or leave a gap, or ranks with the same region hold other bytes there.
    """
    numbers: dict[Pattern, int] = {}
    # The regions and the shape of a row → its pattern: most rows are alike.
    by_regions: dict[tuple[object, ...], int] = {}
    split_rows: list[tuple[int, int]] = []
    for row, of_groups in region_numbers.items():
        path, _, shape, _ = table[row]
        numbers_of_groups = tuple(of_groups)
        number = by_regions.get((numbers_of_groups, *shape))
        if number is None:
            numbers_held = [numbers_of_groups[group] for group in members]
            held = [
                None if one is None else proposals[rank].held.regions[one]
                for rank, one in enumerate(numbers_held)
            ]
            item_bytes = next(one[0] for one in held if one is not None)
            try:
                pattern = unite(shape, item_bytes, [None if one is None else one[1] for one in held])
            except ProtocolError as error:
                raise StateError(
                    f"tensor {path}: {error}; the parts that ranks hand over must make up the whole, each part once or "
                    "the same on several ranks"
                ) from error
            number = by_regions[numbers_of_groups, *shape] = numbers.setdefault(pattern, len(numbers))
        split_rows.append((row, number))
    patterns = tuple(numbers)
    _check_holders(table, patterns, split_rows, {rank: of for rank, of in enumerate(sums) if of})
    return patterns, tuple(split_rows)


def _check_holders(
    table: Sequence[Sequence[Any]],
    patterns: Sequence[Pattern],
    split_rows: Sequence[tuple[int, int]],
    sums: Mapping[int, Sequence[int]],
) -> None:
    """Check that ranks with the same region of a tensor hold the same bytes there. Raises `StateError`."""
    arrays = {rank: np.asarray(of, np.uint32) for rank, of in sums.items()}
    found: list[tuple[int, int]] = []  # row, and the region in which it differs
    for number, pattern in enumerate(patterns):
        rows = np.array([row for row, of in split_rows if of == number])
        for region, holders in enumerate(pattern.holders):
            compared = [rank for rank in holders if rank in arrays]
            if len(compared) < 2 or compared[0] != holders[0]:
                continue
            expected = arrays[holders[0]][rows]
            for rank in compared[1:]:
                differ = np.flatnonzero(arrays[rank][rows] != expected)
                found += [(int(rows[place]), region) for place in differ[:1]]
    if not found:
        return
    row, region = min(found)
    pattern = patterns[dict(split_rows)[row]]
    holders = pattern.holders[region]
    others = [rank for rank in holders if rank in sums and sums[rank][row] != sums[holders[0]][row]]
    raise StateError(
        f"tensor {table[row][0]}: {format_ranks(others)} and rank {holders[0]} hold the same region, "
        f"{pattern.regions[region]}, with other bytes; bring replicas together before the first save, for "
        "example by torch.distributed.broadcast, or look for what has changed one of them"
    )


def pickle_reserve_bytes(pickle_bytes: int) -> int:
    """Room for data.pkl: twice its present size, in steps of 64 KiB, so that a growing value rarely outgrows it."""
    unit = _PICKLE_RESERVE_UNIT_BYTES
    return max(unit, (2 * pickle_bytes // unit + 1) * unit)


def describe_difference(first: Proposal, other: Proposal) -> str:
    """Describe the first difference of `other` from `first` (rank 0's), whose digests differ: tensor, expected, got."""
    for expected, got in zip(first.table, other.table, strict=False):
        if expected == got:
            continue
        path, old, new = expected[0], _describe_row(expected), _describe_row(got)
        if path == got[0]:
            return f"tensor {path}: expected {old} as on rank 0, got {new}"
        return f"expected tensor {path} {old} as on rank 0, got tensor {got[0]} {new} there"
    return (
        f"expected a table with digest {first.table_digest[:16]} as on rank 0, got {other.table_digest[:16]}, "
        "though the rows are equal; is holdfast the same version on all nodes?"
    )


def _describe_row(row: Sequence[Any]) -> str:
    _, dtype, shape, owner = row
    role = {REPLICATED: "replicated", SPLIT: "split"}.get(owner, f"of rank {owner}")
    return f"({dtype} {json.dumps(shape)}, {role})"


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
