"""The choice of a checkpoint, and of the places to read it from. Does no I/O.

    slices that ranks found ─┐
                             ├─► candidates, newest first; among equals the nearest first
    manifests of the store ──┘

A candidate is whole if some rank found each saved rank's slice, or if the store has the same checkpoint to fill the
gaps: same attempt, step, number of ranks and layout. All inputs are known to all ranks, so all compute the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from holdfast.errors import ConfigError
from holdfast.image.best_rule import BestMode, BestRule, is_metric_name, no_best_error, rule_of
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.replicas import describe_drifted_groups, group_by_digest
from trainer_side.whole_number import describe_value

STORE = -1  # as the number of a slice: the portable file
RING = "ring"  # as the name of a job: attempt and step identify slices in the ring
NEARNESS_OF_RING = 4
_PLACES_NAMED = 8
NEARNESS_OF_STORE = 5  # a rank's own tiers are nearer


class SliceKey(NamedTuple):
    """The checkpoint that a slice belongs to."""

    attempt: int
    step: int
    ranks: int
    digest: str
    job: str


class Holder(NamedTuple):
    """A slice that a rank has found in one of its tiers."""

    key: SliceKey
    slice_rank: int  # the saved rank whose slice it is
    rank: int  # the rank that found it
    number: int  # its index among the slices that this rank found
    nearness: int  # 0 is nearest
    tier: str  # for messages, like `place`
    place: str
    absent: frozenset[int] = frozenset()  # chunks whose frame is missing
    # Fingerprints of the replicas on the rank that wrote it, from its seal; empty without any.
    replicas: str = ""
    drift: str = ""  # a known difference between the ranks
    complete: bool = False  # every rank is known to have sealed that step
    # Runs of experiment trackers; in the slice of saved rank 0.
    trackers: Mapping[str, str] = MappingProxyType({})


class RankPlace(NamedTuple):
    """Where a rank of this job is, and which tiers it has looked into."""

    host: str
    tiers: tuple[str, ...]


class StoreCandidate(NamedTuple):
    """A checkpoint of the store, according to its manifest."""

    number: int
    attempt: int
    step: int
    ranks: int
    digest: str
    fault: str  # why it cannot be used; empty if it can
    drift: str = ""  # how its replicas differed, or why it may be torn
    is_unreadable: bool = False  # the store lists the manifest but does not return it
    metrics: Mapping[str, float] | None = None  # from the script
    best_metric: str = ""  # with `best_mode`: the writer's rule for the best checkpoint, if any
    best_mode: str = ""


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that is not a candidate, and why."""

    attempt: int
    step: int
    reason: str
    was_complete: bool  # it existed once; False: perhaps it was never finished
    is_unreadable: bool = False  # the store lists its manifest but does not return it: it may be whole


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be restored."""

    attempt: int
    step: int
    stored: int  # its number in the store's list; `STORE` if the store does not have it
    key: SliceKey | None = None  # of its slices; None without slices
    # Saved rank → holders of its slice, nearest first. Empty: the checkpoint is read from the store alone.
    slices: Mapping[int, tuple[Holder, ...]] = field(default_factory=dict)
    drift: str = ""  # why its replicas differ or it may be torn, so that it is tried last; empty if sound

    @property
    def name(self) -> str:
        return str(self.checkpoint)

    @property
    def trackers(self) -> Mapping[str, str]:
        """The runs of experiment trackers, from its slices."""
        return next((one.trackers for one in self.slices.get(0, ()) if one.trackers), {})

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


def candidates(
    holders: Iterable[Holder], stored: Sequence[StoreCandidate], places: Sequence[RankPlace] = ()
) -> list[Candidate | SkippedCheckpoint]:
    """Return all checkpoints, newest first, each as a candidate or with the reason why it is not. `places`: by rank.

    A checkpoint in both tiers and store is listed twice: first from the nearest place, then from the store alone.
    Checkpoints with drifted replicas rank last: they are better than nothing.
    """
    groups: dict[SliceKey, dict[int, list[Holder]]] = {}
    for holder in holders:
        groups.setdefault(holder.key, {}).setdefault(holder.slice_rank, []).append(holder)
    _merge_ring_slices(groups, stored)
    ranked: list[tuple[tuple[int, ...], Candidate | SkippedCheckpoint]] = []
    for key, by_rank in sorted(groups.items()):
        found = {
            rank: tuple(sorted(by_rank[rank], key=lambda one: (one.nearness, one.rank, one.number)))
            for rank in sorted(by_rank)
        }
        same = next((one.number for one in stored if not one.fault and _is_same_checkpoint(one, key)), STORE)
        newest_first = (-key.attempt, -key.step)
        if same != STORE or len(found) == key.ranks:
            drift = _drift(key, found, stored)
            candidate = Candidate(key.attempt, key.step, same, key, found, drift)
            farthest = max(some[0].nearness for some in found.values())
            ranked.append(((int(bool(drift)), *newest_first, 0, -len(found), farthest), candidate))
        else:
            was_complete = any(holder.complete for some in found.values() for holder in some)
            gap = _describe_gap(key, found, places, was_complete)
            skipped = SkippedCheckpoint(key.attempt, key.step, gap, was_complete=was_complete)
            ranked.append(((0, *newest_first, 3, 0), skipped))
    for one in stored:
        newest_first = (-one.attempt, -one.step)
        if one.fault:
            skipped = SkippedCheckpoint(
                one.attempt, one.step, one.fault, was_complete=True, is_unreadable=one.is_unreadable
            )
            ranked.append(((0, *newest_first, 2, 0), skipped))
        else:
            alone = Candidate(one.attempt, one.step, one.number, drift=one.drift)
            ranked.append(((int(bool(one.drift)), *newest_first, 1, 0), alone))
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def skip_set_aside(
    listed: Sequence[Candidate | SkippedCheckpoint], set_aside: Collection[CheckpointId]
) -> Sequence[Candidate | SkippedCheckpoint]:
    """Return the list, in which one `SkippedCheckpoint` replaces each checkpoint that is set aside, wherever stored."""
    if not set_aside:
        return listed
    left: list[Candidate | SkippedCheckpoint] = []
    named: set[CheckpointId] = set()
    for item in listed:
        if isinstance(item, SkippedCheckpoint) or not item.checkpoint.is_set_aside(set_aside):
            left.append(item)
        elif item.checkpoint not in named:
            named.add(item.checkpoint)
            reason = f"{item.name} is set aside by the setting restore_set_aside"
            left.append(SkippedCheckpoint(item.attempt, item.step, reason, was_complete=True))
    return left


def _drift(key: SliceKey, found: Mapping[int, tuple[Holder, ...]], stored: Sequence[StoreCandidate]) -> str:
    drift = next((one.drift for one in stored if one.drift and _is_same_checkpoint(one, key)), "")
    drift = drift or next((one.drift for some in found.values() for one in some if one.drift), "")
    digests = {rank: some[0].replicas for rank, some in found.items()}
    return drift or describe_drifted_groups(group_by_digest(digests), key.step)


def _merge_ring_slices(
    groups: dict[SliceKey, dict[int, list[Holder]]], stored: Sequence[StoreCandidate]
) -> None:
    """Merge the ring's slices into those of tiers, if the store's manifest shows that both are one checkpoint."""
    for key in [key for key in groups if key.job == RING]:
        tiers = [other for other in groups if other[:4] == key[:4] and other.job != RING]
        if not any(not one.fault and _is_same_checkpoint(one, key) for one in stored):
            continue
        for other in tiers:
            for rank, some in groups[key].items():
                groups[other].setdefault(rank, []).extend(holder._replace(key=other) for holder in some)
        if tiers:
            del groups[key]


def _is_same_checkpoint(one: StoreCandidate, key: SliceKey) -> bool:
    return (one.attempt, one.step, one.ranks, one.digest) == (key.attempt, key.step, key.ranks, key.digest)


def _describe_gap(
    key: SliceKey, found: Mapping[int, tuple[Holder, ...]], places: Sequence[RankPlace], was_complete: bool
) -> str:
    missing = [rank for rank in range(min(key.ranks, len(found) + 4)) if rank not in found][:3]
    named = ", ".join(map(str, missing))
    count = key.ranks - len(found)
    more = f" and {count - len(missing)} more" if count > len(missing) else ""
    text = (
        f"step {key.step} (attempt {key.attempt}): the local tiers have {len(found)} of its {key.ranks} slices; those "
        f"of ranks {named}{more} are missing, and the store does not have this step"
    )
    if not (was_complete and places):
        return text
    having = {holder.rank for some in found.values() for holder in some}
    lacking = [rank for rank in range(len(places)) if rank not in having]
    what = "no slice of it"
    if not lacking:  # ranks on one machine find each other's slices
        what = "not its slice"
        lacking = [rank for rank in range(len(places)) if rank < key.ranks and rank not in found]
    who = [
        f"rank {rank} on host {places[rank].host} has {what} in {', '.join(places[rank].tiers) or 'any tier'}"
        for rank in lacking[:_PLACES_NAMED]
    ]
    if len(lacking) > _PLACES_NAMED:
        who.append(f"and {len(lacking) - _PLACES_NAMED} more ranks")
    nobody = (
        "each rank of this job has some slices, so the missing ones were on a machine that is not in this job"
    )
    return f"{text}. Every rank had sealed it: {'; '.join(who) or nobody}"


class WantedBest(NamedTuple):
    """The metric of the best checkpoint. `mode`: None: as in the newest manifest that names the metric."""

    metric: str
    mode: BestMode | None = None


def parse_best(best: Any, mode: Any, step: Any) -> WantedBest | None:
    """Check the arguments of `restore()`; return None without `best`. ConfigError: wrong, or not allowed together."""
    if mode not in (None, "min", "max"):
        raise ConfigError(f'restore(): mode: expected "min" or "max", got {describe_value(mode)}')
    if best is None:
        if mode is not None:
            raise ConfigError(f'restore(): mode="{mode}" is for a metric; give best="NAME" with it')
        return None
    if not is_metric_name(best):
        raise ConfigError(
            f'restore(): best: expected the name of a metric, such as "val_loss", got {describe_value(best)}'
        )
    if step is not None:
        raise ConfigError("restore(): step and best name a checkpoint each; give one of them")
    return WantedBest(best, mode)


def best_first(
    listed: Sequence[Candidate | SkippedCheckpoint],
    stored: Sequence[StoreCandidate],
    wanted: WantedBest,
    where: str,
) -> Sequence[Candidate | SkippedCheckpoint]:
    """Return the items of `listed` that have the metric, best first. Places of one checkpoint keep their order.

    `listed`: All checkpoints, newest first. `stored`: The manifests of the store; slices without one have no metric.
    StoreMissing: No good checkpoint has the metric. ConfigError: Neither `wanted` nor a manifest gives the mode.
    """
    metrics = {CheckpointId(one.attempt, one.step): one.metrics for one in stored if one.metrics}
    rules = [{"metric": one.best_metric, "mode": one.best_mode} for one in stored]
    recorded = [BestRule.model_validate(one) if one["metric"] else None for one in rules]
    rule = rule_of(wanted.metric, wanted.mode, recorded)
    usable = [one for one in listed if isinstance(one, Candidate) and one.checkpoint in metrics]
    if rule is None or all(rule.metric not in metrics[one.checkpoint] for one in usable):
        raise no_best_error(where, wanted.metric, [metrics[one.checkpoint] for one in usable])
    found = [
        (rule.key(values, order, has_caveat=isinstance(one, Candidate) and bool(one.drift)), number)
        for number, one in enumerate(listed)
        if rule.metric in (values := metrics.get(order := CheckpointId(one.attempt, one.step), {}))
    ]
    return [listed[number] for _, number in sorted(found)]
