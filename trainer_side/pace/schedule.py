"""The steps at which this rank saves with `every="auto"`: the same ones on every rank.

    STARTING   16 steps, then at multiples of 32, 64, … 1024: no messages are needed
       │ appointed at step S
       ▼
    PACED      at `first` and every `every`-th after it, until another pace is appointed
       │ the stager is lost, or says that a rank may have another pace
       ▼
    LOOSE      at multiples of the power of two that is not below `every`

A rank that has promised a step waits there for the stager (trainer_side/notice/promised_steps.py), so all ranks
change at one step or none does. Only a stager that dies between two sends can leave ranks with different paces. They
are LOOSE then, and powers of two divide each other: all of them save at the multiples of the greatest.
STARTING is of the same kind, so a rank that never was paced fits in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

from holdfast.config import TrainerConfig
from holdfast.notices.messages import Announcement, StepAnswer, StepWord
from holdfast.wire.pace import EVERY_MAX, Pace
from trainer_side.notice.promised_steps import PromisedSteps
from trainer_side.whole_number import STEP_MAX, whole_number

FIRST_EVERY = 16  # iterations that are measured before the first checkpoint
AUTO = "auto"
_START_EVERY_MAX = 1024


def chosen_interval(every: Any, config: TrainerConfig) -> int | None:
    """The interval that holds: the script's, or that of the settings; None: `auto`. ConfigError: it is no interval."""
    every = config.every if every is None else every
    if isinstance(every, str) and every == AUTO:
        return None
    return whole_number(
        every, "every", most=STEP_MAX, advice=f'give a number of training steps, 0 for none, or "{AUTO}"'
    )


class SchedulePhase(Enum):
    """The source of the steps; see the module."""

    STARTING = "starting"
    PACED = "paced"
    LOOSE = "loose"


class Schedule:
    """See the module. Without `auto` the script's own interval holds, and every proposal is refused.

    Training waits `wait_seconds_max` at a promised step; the stager is lost then.
    """

    def __init__(self, *, auto: bool, wait_seconds_max: float) -> None:
        self._auto = auto
        self.promises: PromisedSteps[Pace] = PromisedSteps(wait_seconds_max)
        self.phase = SchedulePhase.STARTING  # where the steps come from now
        self._pace = Pace(0, FIRST_EVERY)  # STARTING: `first` counts the steps that are done; LOOSE: 0
        self._begun = False

    @property
    def every(self) -> int:
        """Steps between two checkpoints now."""
        return self._pace.every

    def reach(self, step: int, shorten: Callable[[int], int] = lambda every: every) -> bool:
        """Training has done `step`; whether it is time to save. Training thread.

        `shorten` gives the interval for now, from the usual one: it is shorter for a while after a notice.
        """
        with self.promises.lock:
            if not self._begun:
                self._begun = True
                if self.phase is SchedulePhase.STARTING:
                    self._pace = Pace(_multiple(step + FIRST_EVERY, FIRST_EVERY), FIRST_EVERY)
            due = self.promises.reach(step)
            if due:
                self._pace, self.phase = due[-1], SchedulePhase.PACED
            return self._is_time(step, shorten(self._pace.every))

    def heard(self, said: Announcement, step_seconds: float | None = None) -> StepAnswer | None:
        """A SAVE_EVERY has come; the answer, if there is one. ProtocolError: it is malformed. Link's thread."""
        pace = Pace.from_json(said.body) if said.word is StepWord.APPOINTED else None
        with self.promises.lock:
            here = StepAnswer(said.number, self.promises.last_step + 1, step_seconds)
            if not self._auto:
                mine = {"refusal": 'it saves at its own steps, not by every="auto"'}
                return replace(here, body=mine) if said.word is StepWord.PROPOSED else None
            kept = self.promises.heard(said, pace)
            if said.word is StepWord.LOOSE:
                self._loosen()
            if said.word is StepWord.PROPOSED:
                return here
            vain = {"refusal": f"no agreement came at step {said.step}; the rank trains on"}
            return None if kept else replace(here, body=vain)

    def end(self) -> None:
        """Nothing more is heard: the stager is lost, or the job is over. Any thread."""
        with self.promises.lock:
            self._loosen()

    def _is_time(self, step: int, every: int) -> bool:
        """The lock is held."""
        match self.phase:
            case SchedulePhase.PACED:
                return step >= self._pace.first and (step - self._pace.first) % every == 0
            case SchedulePhase.LOOSE:  # also where it is shorter: a part of it need not divide it
                return (step + 1) % every == 0 or (step + 1) % self._pace.every == 0
        done = step + 1
        if done < self._pace.first:
            return every < self._pace.every and done % every == 0
        longer = min(2 * self._pace.every, _START_EVERY_MAX)
        self._pace = Pace(_multiple(done + 1, longer), longer)
        return True

    def _loosen(self) -> None:
        """The lock is held. A rank that never was paced stays as it is: it shares steps with every LOOSE one."""
        self.promises.end(forget_appointed=True)
        if self.phase is SchedulePhase.PACED:
            self.phase = SchedulePhase.LOOSE
            self._pace = Pace(0, 1 << (min(self._pace.every, EVERY_MAX) - 1).bit_length())


def _multiple(least: int, of: int) -> int:
    """The first multiple of `of` that is not below `least`."""
    return -(-least // of) * of
