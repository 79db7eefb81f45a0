"""Draws the kills from a seed, between the checkpoints of the reference run. Pure.

reference's checkpoints   ──3────────7────────11────────15──     a kill lies between two checkpoints,
plan_kills                      ▲5        ▲9                     no two kills in the same gap: a checkpoint
                            one rank    the stager               to compare follows each kill

KillSequence: record_…, tick ─► GiveNotice, SendKill (SIGKILL)      one at a time
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from holdfast.errors import ConfigError


class KillTarget(StrEnum):
    RANK = "one rank"
    RANKS = "all ranks"
    STAGER = "stager and ranks"  # a short script ends before it notices the loss of the stager only
    LAUNCHER = "the launcher"
    WRAPPER = "the process that started one rank"


_WITHOUT_NOTICE = [KillTarget.RANK, KillTarget.RANKS, KillTarget.STAGER, KillTarget.LAUNCHER]


@dataclass(frozen=True, slots=True)
class Kill:
    number: int  # counted from 1
    target: KillTarget
    notice: bool  # whether the rank first gets a notice; SIGKILL follows the answer, or the end of `notice_seconds`
    rank: int  # the rank that is killed, or whose wrapper is killed
    after_step: int
    delay_fraction: float  # delay after that step, as a share of a step's time, below 1

    @property
    def description(self) -> str:
        match self.target:
            case KillTarget.RANK:
                who = f"rank {self.rank}"
            case KillTarget.WRAPPER:
                who = f"the wrapper of rank {self.rank}"
            case _:
                who = self.target.value
        return f"notice, then {who}" if self.notice else who


def plan_kills(seed: int, kills: int, ways: str, *, ranks: int, checkpoints: Sequence[int]) -> list[Kill]:
    """Draw the kills. Equal arguments give equal kills. Raises `ConfigError`: the run has too few checkpoints."""
    random_ = random.Random(seed)  # noqa: S311 - must be repeatable
    gaps = list(itertools.pairwise(sorted(set(checkpoints))))
    if len(gaps) < kills:
        raise ConfigError(
            f"--kills {kills}: expected a run with {kills + 1} checkpoints or more, got "
            f"{len(gaps) + bool(checkpoints)}: each kill needs one before and one after it. Train for more steps, save "
            "more often, or give fewer --kills"
        )
    chosen = sorted(random_.sample(range(len(gaps)), kills))
    turn = random_.randrange(2)
    targets_left: list[KillTarget] = []
    found = []
    for number, gap in enumerate(chosen, 1):
        notice = ways == "notice" or (ways == "both" and (number + turn) % 2 == 0)
        if not notice and not targets_left:
            targets = [KillTarget.WRAPPER] if ways == "wrapper" else _WITHOUT_NOTICE
            targets_left = random_.sample(targets, len(targets))  # each target once before one repeats
        target = KillTarget.RANK if notice else targets_left.pop()
        first, following = gaps[gap]
        step = random_.randrange(first, max(first + 1, following - 1))
        found.append(Kill(number, target, notice, random_.randrange(ranks), step, random_.random()))
    return found


class GiveNotice(NamedTuple):
    """Send SIGTERM to the rank of the kill, as a notice."""

    kill: Kill


class SendKill(NamedTuple):
    """Send SIGKILL now."""

    kill: Kill


class KillSequence:
    """Says when each kill is due. The caller passes the time. A kill that comes later than planned, as in a script of
    short steps, delays the next one, so that a comparable checkpoint lies between them. `notice_seconds`: from a notice
    to the kill, if holdfast does not answer it earlier. `comparable`: steps of the reference's checkpoints.
    """

    def __init__(self, kills: Sequence[Kill], *, notice_seconds: float, comparable: Collection[int]) -> None:
        self._remaining = list(kills)
        self._notice_seconds = notice_seconds
        self._comparable = frozenset(comparable)
        self._has_staged = False  # before, a kill would only show that the script starts from scratch
        self._staged_step = -1  # newest comparable one since the last kill
        self._attempt, self._first_step = 0, -1  # the attempt that trains, and its first step
        self._killed_attempt: int | None = None
        self._is_training = False  # every rank has done its first step since the last kill
        self._step, self._stepped_at = -1, 0.0
        self._step_seconds = 0.0
        self._notice_at: float | None = None
        self._has_answer = False

    def record_training(self) -> None:
        """Record that every rank of an attempt has done its first step."""
        self._is_training = True

    def record_staged(self, step: int) -> None:
        """Record that a checkpoint of this run was staged."""
        self._has_staged = True
        if step in self._comparable:
            self._staged_step = max(self._staged_step, step)

    def record_step(self, step: int, at: float, attempt: int) -> None:
        if attempt > self._attempt:
            self._attempt, self._first_step = attempt, step
        if step == self._step + 1:
            self._step_seconds = max(0.0, at - self._stepped_at)
        self._step, self._stepped_at = step, at

    def record_answer(self) -> None:
        """Record that holdfast has answered the notice."""
        self._has_answer = self._notice_at is not None

    def tick(self, now: float) -> GiveNotice | SendKill | None:
        """Return the action that is due now, or None."""
        if not self._remaining or not self._is_training or not self._has_staged:
            return None
        if self._killed_attempt is not None and (
            self._attempt <= self._killed_attempt or self._staged_step < self._first_step
        ):
            return None
        kill = self._remaining[0]
        if self._notice_at is not None:
            if not self._has_answer and now < self._notice_at + self._notice_seconds:
                return None
            return self._send_kill(kill)
        if self._step < kill.after_step or now < self._stepped_at + kill.delay_fraction * self._step_seconds:
            return None
        if kill.notice:
            self._notice_at = now
            return GiveNotice(kill)
        return self._send_kill(kill)

    def _send_kill(self, kill: Kill) -> SendKill:
        self._remaining.pop(0)
        self._is_training = self._has_answer = False
        self._notice_at = None
        self._killed_attempt, self._staged_step = self._attempt, -1
        return SendKill(kill)
