"""Decides whether a checkpoint is to blame for crashes after its restore; if so, the one before it is restored. Pure.

    restored from C, crashed    --crashes-max times, the same way, nothing newer staged    C is set aside
    restored from B, …                                                                     B is set aside
    …                           --set-aside-max in a row                                   the run ends, as without this

A loss from outside (a kill, a lost host, no memory) says nothing about a checkpoint, and does not count. Nor does a
crash before every rank had its state back, or one after which the next attempt has a newer checkpoint to begin with. If
a job trains the step again from an older checkpoint, and crashes the same way again, it has a bug: no further
checkpoint is set aside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from holdfast.image.checkpoint_id import CheckpointId
from operator_side.supervise.limits import Limits
from operator_side.supervise.record import AttemptRecord
from operator_side.supervise.verdict import OUT_OF_MEMORY, Cause, Verdict


class SetAside(NamedTuple):
    """A checkpoint to set aside; the next attempt restores `fallback`."""

    key: CheckpointId
    fallback: CheckpointId
    crashes: int


class Suspicion:
    """Counts the crashes after the restore of one checkpoint. `set_aside`: all checkpoints that this supervisor has set
    aside, oldest first; restore skips them. `is_open`: the next attempt will show whether the checkpoint is to blame.
    """

    def __init__(self, limits: Limits) -> None:
        # With --crashes-max 1 the first crash ends the run, so no crash is ever seen twice.
        self._crashes_max = limits.crashes_max
        self._in_a_row_max = limits.set_aside_max if limits.crashes_max > 1 else 0
        self.set_aside: tuple[CheckpointId, ...] = ()
        self.is_open = False
        self._suspect: tuple[CheckpointId, str] | None = None  # and how the job crashed after its restore
        self._crashes = 0
        self._in_a_row = 0  # set aside in a row since the run last passed them
        self._highest_step = -1  # the highest step set aside in this row
        self._signature = ""  # how the job had crashed when the last one was set aside
        self._has_caught_up = False  # a step as high was staged again since then

    def check_attempt(self, verdict: Verdict, attempt: AttemptRecord) -> SetAside | None:
        """Count an attempt that has ended. Return the checkpoint that is to blame, or None."""
        self.is_open = False
        if self._in_a_row and attempt.staged_step > self._highest_step:
            self._in_a_row, self._highest_step, self._has_caught_up = 0, -1, False
        self._has_caught_up |= self._in_a_row > 0 and attempt.staged_step == self._highest_step
        if verdict.cause is not Cause.CRASHED or verdict.signature == OUT_OF_MEMORY:
            return None
        key, fallback = attempt.restored_from, attempt.fallback
        if key is None or fallback is None or attempt.staged_step >= 0:
            self._suspect, self._crashes = None, 0
            return None
        if self._in_a_row >= self._in_a_row_max or (
            self._has_caught_up and verdict.signature == self._signature
        ):
            return None
        suspect = (key, verdict.signature)
        self._crashes = self._crashes + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        self.is_open = True
        return SetAside(key, fallback, self._crashes) if self._crashes >= self._crashes_max else None

    def record_set_aside(self, found: SetAside, signature: str) -> None:
        """Set the checkpoint aside, for crashes with this signature."""
        self.set_aside += (found.key,)
        self._suspect, self._crashes = None, 0
        self._in_a_row += 1
        self._highest_step = max(self._highest_step, found.key.step)
        self._signature, self._has_caught_up = signature, False

    def explain(self, final_verdict: Verdict) -> Verdict:
        """Return the run's last verdict, with the checkpoints that were set aside without success."""
        if not self._in_a_row:
            return final_verdict
        names = ", ".join(str(key) for key in self.set_aside[-self._in_a_row :])
        return replace(
            final_verdict, message=f"{final_verdict.message}; set aside before, which did not help: {names}"
        )
