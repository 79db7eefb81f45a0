"""The loss if the run were killed now: steps, seconds, dollars. Pure arithmetic.

    work ──────────saved────────────saved──────────now
                     │ newest durable │ newest staged
                     │                └── trainers killed: this work is done again
                     └── trainers and the stager's node killed: this, too

Lost is the work since `save()` of the newest safe checkpoint, or since the job began, if that was later: an earlier
loss does not count again. Seconds are wall time and exact. Ranks only report the steps that they save, so the number of
later steps is an estimate from the pace of the last saves, and marked as one.
"""

from __future__ import annotations

from dataclasses import dataclass

_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class SavedPoint:
    attempt: int
    step: int
    saved_at_unix: float


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The facts from which the loss is computed."""

    now_unix: float
    running_since_unix: float | None  # when the job's stager was ready; None: no job is running
    staged: SavedPoint | None = None  # the newest checkpoint that is complete in ring or store
    durable: SavedPoint | None = None  # the newest in the store
    newest: SavedPoint | None = None  # the newest checkpoint that a rank has saved, even if it was lost
    step_seconds: float | None = None  # wall time of a step, from the last saves; None: unknown yet
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    steps: int | None  # lost steps; None: unknown
    is_estimate: bool  # the steps since the newest save are estimated
    seconds: float
    dollars: float | None
    since_step: int | None  # the step that training would resume from; None: the beginning


def loss_with_trainers(known: LossInputs) -> Loss:
    """Compute the loss if all training ranks are killed, but not the stager's node."""
    return _compute_loss(known, known.staged, 0.0)


def loss_with_node(known: LossInputs) -> Loss:
    """Compute the loss if all training ranks and the stager's node are killed, and the ring with them."""
    staged, durable, since = known.staged, known.durable, known.running_since_unix
    earlier_seconds = 0.0
    # A checkpoint that an earlier job staged and this one resumed from exists only in the ring until it is durable.
    if staged is not None and _is_newer(staged, durable) and (since is None or staged.saved_at_unix <= since):
        earlier_seconds = 0.0 if durable is None else max(0.0, staged.saved_at_unix - durable.saved_at_unix)
    return _compute_loss(known, durable, earlier_seconds)


def _compute_loss(known: LossInputs, safe: SavedPoint | None, earlier_seconds: float) -> Loss:
    seconds = earlier_seconds
    if known.running_since_unix is not None:
        begun = (
            known.running_since_unix if safe is None else max(known.running_since_unix, safe.saved_at_unix)
        )
        seconds += max(0.0, known.now_unix - begun)
    steps, is_estimate = _lost_steps(known, safe)
    dollars = price(seconds, known.dollars_per_hour)
    return Loss(steps, is_estimate, seconds, dollars, None if safe is None else safe.step)


def price(seconds: float, dollars_per_hour: float | None) -> float | None:
    return None if dollars_per_hour is None else seconds * dollars_per_hour / _HOUR_SECONDS


def _lost_steps(known: LossInputs, safe: SavedPoint | None) -> tuple[int | None, bool]:
    reached, safe_step = known.newest or known.staged, -1 if safe is None else safe.step
    if known.running_since_unix is None:
        reached = known.staged
    if reached is None:
        return (0, False) if known.running_since_unix is None else (None, True)
    steps, is_estimate = reached.step - safe_step, False
    if known.running_since_unix is not None:
        is_estimate = True
        began = max(reached.saved_at_unix, known.running_since_unix)
        since_seconds = max(0.0, known.now_unix - began)
        if since_seconds and not known.step_seconds:
            return None, True
        if known.step_seconds:
            steps += int(since_seconds / known.step_seconds)
    return max(0, steps), is_estimate


def _is_newer(point: SavedPoint, other: SavedPoint | None) -> bool:
    return other is None or (point.attempt, point.step) > (other.attempt, other.step)
