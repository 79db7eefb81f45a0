"""How a run's time was used: new work, work done twice, stalls, getting back. Pure arithmetic on attempts.

    launched ─starting─► training ─────────────► lost ─getting back─► training ────► ended ─between runs──► launched
                             saved │◄─ done twice ─►│

The cost of a loss is computed as in `holdfast status` (loss.py), with the checkpoint that the next attempt resumed
from. If the time of its `save()` is unknown, so is the repeated work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.telemetry.rows import CheckpointRow
from operator_side.report.attempts import ReportedAttempt
from operator_side.status.loss import Loss, LossInputs, SavedPoint, loss_with_trainers, price
from operator_side.status.run_status import Interval, last_interval

_SAME_SECONDS = 0.001
_FIRST_STEP_SECONDS = 1.0  # the first save may begin before the last rank has reported its first step
PARTS = {
    "new work": "training whose result was kept",
    "work done twice": "training since the checkpoint from which the next attempt resumed",
    "stalls for checkpoints": "a checkpoint blocked the training thread of the slowest rank (CST)",
    "getting back after losses": "from the first sign of a loss until all ranks had done a step again",
    "starting": "from a launch that follows no loss to the first step of all ranks",
    "between runs": "a run was done or stopped, and the next one not launched yet",
}
_OVERHEAD = ("work done twice", "stalls for checkpoints", "getting back after losses")


@dataclass(frozen=True, slots=True)
class Interruption:
    """An attempt that ended badly, and the recovery from it."""

    attempt: ReportedAttempt
    recovery: ReportedAttempt | None  # the attempt that trained again; None: unknown
    down_seconds: float  # from the first sign of the loss until training continued, or to the last known time
    lost: Loss | None  # work that had to be repeated; None: unknown
    dollars_per_hour: float | None

    @property
    def cost_seconds(self) -> float:
        """Seconds until training continued plus seconds of repeated work, as far as known."""
        return self.down_seconds + (self.lost.seconds if self.lost is not None else 0.0)

    @property
    def dollars(self) -> float | None:
        return price(self.cost_seconds, self.dollars_per_hour)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The run's time, in parts."""

    total_seconds: float
    parts: Mapping[str, float]  # seconds by the names of `PARTS`; they add up to `total_seconds`
    is_estimate: bool  # no supervisor reported when training continued, or repeated work is unknown
    dollars_per_hour: float | None

    @property
    def up_seconds(self) -> float:
        """Time in which the run was up or starting."""
        return self.total_seconds - self.parts["between runs"]

    @property
    def overhead_seconds(self) -> float:
        """Time spent on losses and checkpoints."""
        return sum(self.parts[name] for name in _OVERHEAD)

    @property
    def share(self) -> float | None:
        """New work, as a share of `up_seconds`."""
        return None if self.up_seconds <= 0 else self.parts["new work"] / self.up_seconds

    def dollars(self, seconds: float) -> float | None:
        return price(seconds, self.dollars_per_hour)


def find_interruptions(
    attempts: Sequence[ReportedAttempt],
    checkpoints: Sequence[CheckpointRow],
    *,
    end_unix: float,
    dollars_per_hour: float | None = None,
) -> list[Interruption]:
    """Return each bad end, oldest first. Losses before an attempt has trained count to the interruption before."""
    saves = [row for row in checkpoints if row.saved_at_unix is not None]
    found: list[Interruption] = []
    kept: list[tuple[float, float]] = []  # training of earlier attempts that is not lost yet
    for index, attempt in enumerate(attempts):
        began, stop = attempt.training_at_unix, attempt.stopped_at_unix
        if began is None and found and _is_recovery(attempt, found[-1]):
            continue
        if not attempt.was_lost:
            if began is not None:
                kept.append((began, stop))
            continue
        recovery = next((one for one in attempts[index + 1 :] if one.training_at_unix is not None), None)
        trained_at = end_unix
        if recovery is not None and recovery.training_at_unix is not None:
            trained_at = recovery.training_at_unix
        down_seconds = max(0.0, trained_at - stop)
        lost = None
        if began is None:
            lost = Loss(0, False, 0.0, price(0.0, dollars_per_hour), None)
        elif recovery is not None:
            lost = _compute_loss(attempt, recovery, saves, kept, dollars_per_hour)
        found.append(Interruption(attempt, recovery, down_seconds, lost, dollars_per_hour))
    return found


def _is_recovery(attempt: ReportedAttempt, before: Interruption) -> bool:
    """Whether an attempt was launched before training continued after that loss."""
    return before.recovery is None or attempt.began_at_unix < before.recovery.began_at_unix


def _compute_loss(
    attempt: ReportedAttempt,
    recovery: ReportedAttempt,
    saves: Sequence[CheckpointRow],
    kept: list[tuple[float, float]],
    dollars_per_hour: float | None,
) -> Loss | None:
    assert attempt.training_at_unix is not None
    stop, began = attempt.stopped_at_unix, attempt.training_at_unix
    if recovery.restored_step is None:
        return None
    safe: SavedPoint | None = None
    if recovery.restored_step >= 0:
        safe = _point(recovery, saves)
        if safe is None:
            return None
    own = [row for row in saves if began <= (row.saved_at_unix or 0.0) <= stop]
    interval = _interval(own) or _interval(saves)
    newest = SavedPoint(own[-1].attempt, own[-1].step, own[-1].saved_at_unix or 0.0) if own else None
    # Work of an earlier attempt since that checkpoint is lost as well, if the next one resumed from an even older one.
    saved_at = 0.0 if safe is None else safe.saved_at_unix
    earlier_seconds = sum(max(0.0, end - max(begin, saved_at)) for begin, end in kept)
    kept[:] = [(begin, min(end, saved_at)) for begin, end in kept if begin < saved_at]
    if saved_at > began:
        kept.append((began, min(stop, saved_at)))
    known = LossInputs(
        now_unix=stop,
        running_since_unix=began,
        staged=safe,
        newest=newest or safe,
        step_seconds=interval.seconds / interval.steps if interval else None,
        dollars_per_hour=dollars_per_hour,
    )
    lost = loss_with_trainers(known)
    if not earlier_seconds:
        return lost
    seconds = lost.seconds + earlier_seconds
    return replace(lost, seconds=seconds, dollars=price(seconds, dollars_per_hour))


def _interval(saves: Sequence[CheckpointRow]) -> Interval | None:
    """Return the distance of the last two checkpoints that one job has saved in a row."""
    points = [(CheckpointId(row.attempt, row.step), row.saved_at_unix or 0.0) for row in saves]
    pairs = (points[index - 1 : index + 1] for index in range(len(points) - 1, 0, -1))
    return next((found for pair in pairs if (found := last_interval(pair)) is not None), None)


def _point(recovery: ReportedAttempt, saves: Sequence[CheckpointRow]) -> SavedPoint | None:
    """Return the checkpoint that an attempt resumed from: the newest of its step that was saved before."""
    for row in reversed(saves):
        at = row.saved_at_unix
        if row.step != recovery.restored_step or at is None or at > (recovery.training_at_unix or at):
            continue
        if recovery.restored_attempt in {None, row.attempt}:
            return SavedPoint(row.attempt, row.step, at)
    return None


def compute_goodput(
    attempts: Sequence[ReportedAttempt],
    interruptions: Sequence[Interruption],
    checkpoints: Sequence[CheckpointRow],
    *,
    end_unix: float,
    dollars_per_hour: float | None = None,
) -> Goodput | None:
    """Split the time from the first launch to the end into parts; None without an attempt."""
    if not attempts:
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    total = max(0.0, end_unix - attempts[0].began_at_unix)
    training = 0.0
    for attempt in attempts:
        if attempt.training_at_unix is not None:
            training += max(0.0, attempt.stopped_at_unix - attempt.training_at_unix)
    parts["getting back after losses"] = sum(one.down_seconds for one in interruptions)
    parts["starting"], parts["between runs"] = _idle(attempts, end_unix)
    repeated = sum(one.lost.seconds for one in interruptions if one.lost is not None)
    stalls = _stall_seconds(checkpoints, attempts, interruptions)
    parts["work done twice"] = min(repeated, training)
    parts["stalls for checkpoints"] = min(stalls, training - parts["work done twice"])
    others = sum(value for name, value in parts.items() if name != "new work")
    parts["new work"] = max(0.0, total - others)
    is_estimate = not attempts[0].is_supervised or any(
        one.lost is None and one.recovery is not None for one in interruptions
    )
    return Goodput(total, parts, is_estimate, dollars_per_hour)


def _stall_seconds(
    rows: Sequence[CheckpointRow], attempts: Sequence[ReportedAttempt], interruptions: Sequence[Interruption]
) -> float:
    """Sum the stalls of checkpoints that were saved while a job trained, except in lost time."""
    trained = [
        (one.training_at_unix - _FIRST_STEP_SECONDS, one.stopped_at_unix)
        for one in attempts
        if one.training_at_unix is not None
    ]
    lost = [
        (one.attempt.stopped_at_unix - one.lost.seconds - _SAME_SECONDS, one.attempt.stopped_at_unix)
        for one in interruptions
        if one.lost is not None
    ]
    found = 0.0
    for row in rows:
        at, stall = row.saved_at_unix, row.stall_seconds
        if at is None or not stall:
            continue
        if any(begin <= at <= end for begin, end in trained) and not any(
            begin <= at <= end for begin, end in lost
        ):
            found += stall
    return found


def _idle(attempts: Sequence[ReportedAttempt], end_unix: float) -> tuple[float, float]:
    """Return the seconds of starts, and those between runs."""
    starting = between = 0.0
    before: ReportedAttempt | None = None  # the last one that was not only a failed recovery
    is_back = False
    for attempt in attempts:
        if before is not None and before.ended_well:
            between += max(0.0, attempt.began_at_unix - before.stopped_at_unix)
        began = attempt.training_at_unix
        if not is_back:
            until = began if began is not None else (attempt.stopped_at_unix if attempt.cause else end_unix)
            starting += max(0.0, until - attempt.began_at_unix)
        is_back = attempt.was_lost or (is_back and began is None)
        before = attempt
    if before is not None and before.ended_well:
        between += max(0.0, end_unix - before.stopped_at_unix)
    return starting, between
