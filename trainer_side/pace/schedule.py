"""The steps at which this rank saves with `every="auto"`: the same ones on every rank.

    STARTING   16 steps, then at multiples of 32, 64, … 1024: no messages are needed
       │ appointed at step S
       ▼
    PACED      at `first` and every `every`-th after it, until another pace is appointed
       │ the stager is lost, or says that a rank may have another pace
       ▼
    LOOSE      at multiples of the smallest power of two that is at least `every`

A rank that has promised a step waits there for the stager (trainer_side/notice/promised_steps.py), so either all ranks
change their pace at one step or none does. Only a stager that dies between two sends can leave ranks with different
paces. They are LOOSE then, and powers of two divide each other: all of them save at the multiples of the greatest.
STARTING uses powers of two as well, so a rank that was never paced fits in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

from holdfast.config import TrainerConfig
from holdfast.notices.messages import Announcement, AnnouncementKind, StepAnswer
from holdfast.wire.pace import EVERY_MAX, Pace
from trainer_side.notice.promised_steps import PromisedSteps
from trainer_side.whole_number import STEP_MAX, whole_number

FIRST_EVERY = 16  # iterations that are measured before the first checkpoint
AUTO = "auto"
_START_EVERY_MAX = 1024


def chosen_interval(every: Any, config: TrainerConfig) -> int | None:
    """Return the script's interval, or that of the settings; None: `auto`. ConfigError: it is no interval."""
    every = config.every if every is None else every
    if isinstance(every, str) and every == AUTO:
        return None
    return whole_number(
        every, "every", most=STEP_MAX, advice=f'give a number of training steps, 0 for none, or "{AUTO}"'
    )


class SchedulePhase(Enum):
    """Where the steps come from; the module describes each phase."""

    STARTING = "starting"
    PACED = "paced"
    LOOSE = "loose"


class Schedule:
    """The steps at which this rank saves. Without `auto` the script chooses them, and every proposal is refused.
    Training waits up to `wait_seconds_max` at a promised step, and then takes the stager for lost.
    """

    def __init__(self, *, auto: bool, wait_seconds_max: float) -> None:
        self._auto = auto
        self.promises: PromisedSteps[Pace] = PromisedSteps(wait_seconds_max)
        self.phase = SchedulePhase.STARTING
        self._pace = Pace(0, FIRST_EVERY)  # STARTING: `first` is a number of steps done; LOOSE: 0
        self._begun = False

    @property
    def every(self) -> int:
        """Steps between two checkpoints now."""
        return self._pace.every

    def reach(self, step: int, shorten: Callable[[int], int] = lambda every: every) -> bool:
        """Note that training has done `step`; return whether a save is due. Training thread. `shorten`: Returns the
        current interval from the usual one: a shorter one for a while after a notice.
        """
        with self.promises.lock:
            if not self._begun:
                self._begun = True
                if self.phase is SchedulePhase.STARTING:
                    self._pace = Pace(_multiple(step + FIRST_EVERY, FIRST_EVERY), FIRST_EVERY)
            due = self.promises.reach(step)
            if due:
                self._pace, self.phase = due[-1], SchedulePhase.PACED
            return self._is_due(step, shorten(self._pace.every))

    def handle(self, announcement: Announcement, step_seconds: float | None = None) -> StepAnswer | None:
        """Take a SAVE_EVERY; return the answer, if any. ProtocolError: it is malformed. Link's thread."""
        pace = Pace.from_json(announcement.body) if announcement.kind is AnnouncementKind.APPOINTED else None
        with self.promises.lock:
            own_answer = StepAnswer(announcement.number, self.promises.last_step + 1, step_seconds)
            if not self._auto:
                refusal = {"refusal": 'it saves at its own steps, not by every="auto"'}
                is_proposal = announcement.kind is AnnouncementKind.PROPOSED
                return replace(own_answer, body=refusal) if is_proposal else None
            kept = self.promises.handle(announcement, pace)
            if announcement.kind is AnnouncementKind.LOOSE:
                self._loosen()
            if announcement.kind is AnnouncementKind.PROPOSED:
                return own_answer
            late = {"refusal": f"no agreement came at step {announcement.step}; the rank trains on"}
            return None if kept else replace(own_answer, body=late)

    def end(self) -> None:
        """Expect no further announcement: the stager is lost, or the job is over. Any thread."""
        with self.promises.lock:
            self._loosen()

    def _is_due(self, step: int, every: int) -> bool:
        """Whether a save is due. The lock is held."""
        match self.phase:
            case SchedulePhase.PACED:
                return step >= self._pace.first and (step - self._pace.first) % every == 0
            case SchedulePhase.LOOSE:  # both: a shortened interval need not divide the usual one
                return (step + 1) % every == 0 or (step + 1) % self._pace.every == 0
        done = step + 1
        if done < self._pace.first:
            return every < self._pace.every and done % every == 0
        longer = min(2 * self._pace.every, _START_EVERY_MAX)
        self._pace = Pace(_multiple(done + 1, longer), longer)
        return True

    def _loosen(self) -> None:
        """Become LOOSE if PACED: a STARTING rank already shares steps with every LOOSE one. The lock is held."""
        self.promises.end(forget_appointed=True)
        if self.phase is SchedulePhase.PACED:
            self.phase = SchedulePhase.LOOSE
            self._pace = Pace(0, 1 << (min(self._pace.every, EVERY_MAX) - 1).bit_length())


def _multiple(least: int, of: int) -> int:
    """Return the first multiple of `of` that is at least `least`."""
    return -(-least // of) * of
