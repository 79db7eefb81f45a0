"""Pure rule for which checkpoints of a run may be removed; `verify_and_prune` deletes the manifest, then the file.

    kept:   the newest `keep_last` good ones · every step that `keep_every` divides · the newest verified one, always ·
        the newest verified one with finite numbers, always · the newest one whose replicas are not known to have
        drifted apart, always · the newest one that no rank copied while training went on, and the newest verified of
        these: all others may turn out to be doubtful · rungs of the ladder: the first one of each of the newest
        `keep_hourly` hours and `keep_daily` days that have one · the `keep_best` best ones by a metric, and as many of
        the verified ones
            · the last few that `holdfast run` has set aside: evidence, which no other rule counts
            · those that `holdfast rewind` has gone back to; on each branch that it has left, what the rule keeps of
              this branch alone, without a ladder
    removed:   the other good ones · bad ones older than the newest good one · of those that are bad for their numbers,
        all but the newest `keep_last`: a diverged training produces them without end

Good is verified or durable. A bad one newer than all good ones stays, as evidence of what just went wrong.

Finite means that no verified checkpoint has fewer numbers that are not finite. A mask of minus infinity in the state
counts in every checkpoint and says nothing; NaN in the weights adds to it. A checkpoint without a count (an older
version wrote it) passes for finite: more is then kept, not less. A checkpoint that is not finite, drifted apart, or
doubtful gets no rung, so that a training that continues with NaN for a week leaves the ladder before it unchanged.

Best are those with the lowest or highest value of the metric. A checkpoint without the metric is never best; a drifted
or doubtful one only if there are too few others. A checkpoint may turn out bad before it is verified, and doubtful if
it was copied while training went on. Therefore the best verified ones, and the best one that can become neither, stay
beside them.

Hours and days tell how far apart checkpoints are, and never which is newer. The first one of an hour stays the first,
and rungs are counted, not compared with the current time: a clock that jumps, or a run that pauses for a month, removes
none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Self

from holdfast.checkpoints.branches import Branches
from holdfast.image.best_rule import BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest, State

_SET_ASIDE_MAX = 3  # each is as large as any other
_HOUR_SECONDS = 3600
_DAY_SECONDS = 24 * _HOUR_SECONDS


@dataclass(frozen=True, slots=True)
class StoredStep:
    """Facts about a checkpoint in the store. Manifests are not kept: each names every tensor, and a run may keep all
    its checkpoints.

    Attributes:
        created_unix: When it was published; None if its manifest has no readable time.
        nonfinite: How many of its numbers are not finite; None: not counted.
        is_doubtful: Whether it may be torn. `is_proven`: whether it can never be doubted, because each rank finished
            its copy inside `save()`.
    """

    attempt: int
    step: int
    file: str
    state: State
    write_id: str
    is_drifted: bool = False
    is_doubtful: bool = False
    is_proven: bool = True
    created_unix: float | None = None
    nonfinite: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def order(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        try:
            created_unix = datetime.fromisoformat(manifest.created).timestamp()
        except (ValueError, OverflowError, OSError):
            created_unix = None
        nonfinite = None if manifest.nonfinite is None else manifest.nonfinite.values
        return cls(
            manifest.attempt,
            manifest.step,
            manifest.file,
            manifest.state,
            manifest.write_id,
            manifest.is_drifted,
            manifest.is_doubtful,
            manifest.is_copied_inside,
            created_unix,
            nonfinite,
            manifest.metrics,
        )

    @property
    def has_caveat(self) -> bool:
        """Whether restore prefers others."""
        return self.is_drifted or self.is_doubtful


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Retention settings.

    Args:
        last: How many of the newest good ones; 0 keeps all, bad ones too.
        every: Good ones whose step this divides as well; 0 is off.
        hourly: The first good one of this many hours as well. `daily`: of days.
        best: This many of the best ones by `rule` as well.

    Raises:
        ValueError: A negative number.
    """

    last: int
    every: int = 0
    hourly: int = 0
    daily: int = 0
    best: int = 0
    rule: BestRule | None = None

    def __post_init__(self) -> None:
        if min(self.last, self.every, self.hourly, self.daily, self.best) < 0:
            raise ValueError(f"what is to be kept must not be negative, got {self}")

    def without_rungs(self) -> RetentionPolicy:
        """Return the same settings without the ladder, for a store that is full."""
        return replace(self, hourly=0, daily=0)


def to_remove(
    known: Sequence[StoredStep],
    keep: RetentionPolicy,
    set_aside: Sequence[CheckpointId] = (),
    branches: Branches | None = None,
) -> list[StoredStep]:
    """Return the checkpoints of `known` that need not be kept, oldest first. `set_aside`: checkpoints that restore
    skips while a supervised run lasts, oldest first; older ones are kept as if these did not exist. `branches`: of a
    rewound run; no checkpoint of an older branch takes the place of one of the current line.
    """
    if branches is None:
        return _to_remove(known, keep, set_aside)
    forks = {one.fork for one in branches.rewinds}
    current = [one for one in known if branches.is_current(one.order)]
    removed = _to_remove(current, keep, set_aside)
    left: dict[int, list[StoredStep]] = {}
    for one in known:
        if not branches.is_current(one.order):
            left.setdefault(branches.number(one.attempt), []).append(one)
    for of_branch in left.values():
        removed += _to_remove(of_branch, keep.without_rungs(), set_aside)
    return sorted((one for one in removed if one.order not in forks), key=lambda one: one.order)


def _to_remove(
    known: Sequence[StoredStep], keep: RetentionPolicy, set_aside: Sequence[CheckpointId]
) -> list[StoredStep]:
    if keep.last == 0:
        return []
    passed = set(set_aside[-_SET_ASIDE_MAX:])
    usable = [one for one in known if one.order not in passed]
    newest_first = sorted(usable, key=lambda one: one.order, reverse=True)
    good = [one for one in newest_first if one.state is not State.BAD]
    evidence = newest_first if not good else [one for one in newest_first if one.order > good[0].order]
    diverged = [one for one in evidence if one.state is State.BAD and one.nonfinite]
    kept = {one.file for one in evidence} - {one.file for one in diverged[keep.last :]}
    kept.update(one.file for one in good[: keep.last])
    kept.update(one.file for one in good if keep.every and one.step % keep.every == 0)
    kept.update([one.file for one in good if not one.has_caveat][:1])
    proven = [one for one in good if one.is_proven and not one.has_caveat]
    # All others may turn out to be doubtful at the same time.
    kept.update([one.file for one in proven][:1])
    kept.update([one.file for one in proven if one.state is State.VERIFIED][:1])
    verified = [one for one in good if one.state is State.VERIFIED]
    # Durable ones count as good, but may turn out bad when they are read back; this one is certain.
    kept.update(one.file for one in verified[:1])
    fewest = min((one.nonfinite for one in verified if one.nonfinite is not None), default=0)
    # If the one with the fewest were removed, others would pass for finite the next time.
    kept.update([one.file for one in verified if one.nonfinite == fewest][:1])
    finite = [one for one in good if one.nonfinite is None or one.nonfinite <= fewest]
    kept.update([one.file for one in finite if one.state is State.VERIFIED][:1])
    kept.update([one.file for one in verified if not one.nonfinite][:1])
    sound = [one for one in finite if not one.has_caveat]
    kept.update(_rungs(sound, _HOUR_SECONDS, keep.hourly))
    kept.update(_rungs(sound, _DAY_SECONDS, keep.daily))
    if keep.rule is not None:
        kept.update(_best(good, keep.rule, keep.best))
        kept.update(_best(verified, keep.rule, keep.best))
        kept.update(
            _best([one for one in proven if one.state is State.VERIFIED], keep.rule, min(1, keep.best))
        )
    return [one for one in reversed(newest_first) if one.file not in kept]


def _best(good: Sequence[StoredStep], rule: BestRule, count: int) -> list[str]:
    rated = [one for one in good if rule.metric in one.metrics]
    rated.sort(key=lambda one: rule.key(one.metrics, one.order, has_caveat=one.has_caveat))
    return [one.file for one in rated[:count]]


def _rungs(newest_first: Sequence[StoredStep], seconds: int, rungs: int) -> list[str]:
    """Return the first checkpoint of each of the newest `rungs` time spans that have one, by checkpoint order."""
    first: dict[int, str] = {}
    for one in newest_first:
        if one.created_unix is None:
            continue
        span = int(one.created_unix // seconds)
        if span not in first and len(first) == rungs:
            continue
        first[span] = one.file
    return list(first.values())
