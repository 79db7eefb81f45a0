"""At which steps this rank saves, with `every="auto"`: the same ones on every rank, whatever is heard when.

    STARTING   16 steps, then at multiples of 32, 64, … 1024: known to all without a word
       │ appointed at step S
       ▼
    PACED      at `first` and every `every`-th after it, until another pace is appointed
       │ the stager is lost, or says that somebody may have heard something else
       ▼
    LOOSE      at multiples of the power of two that is not below `every`

A rank that has promised a step waits there for the stager's word, as in trainer_side/notice/appointments.py; so all
ranks change at one step or none does. Only a stager that dies while it says so can leave ranks with different paces.
They are LOOSE then, and powers of two divide each other: whatever each has heard, all of them save at the multiples of
the greatest. STARTING is of the same kind, so that who never was paced fits in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from holdfast.wire.pace import EVERY_MAX, Pace, PaceWord

FIRST_EVERY = 16  # so many iterations are measured before the first checkpoint
_START_EVERY_MAX = 1024


class SchedulePhase(Enum):
    """Where the steps come from; see the module."""

    STARTING = "starting"
    PACED = "paced"
    LOOSE = "loose"


class Reply(NamedTuple):
    """What is said to the stager. `refusal`: empty if nothing is refused."""

    next_step: int
    refusal: str = ""


class _Promise(NamedTuple):
    """What the stager has not decided yet."""

    step: int
    number: int


class _Appointed(NamedTuple):
    """What holds from a step on that training has not come to yet."""

    step: int
    pace: Pace


class Schedule:
    """See the module.

    Args:
        auto: False: the script's own interval holds, and every proposal is refused.
        wait_seconds_max: How long a promised step is waited for; the stager is lost then.
    """

    def __init__(self, *, auto: bool, wait_seconds_max: float) -> None:
        self._auto, self._wait_seconds_max = auto, wait_seconds_max
        self._changed = threading.Condition()
        self._promise: _Promise | None = None
        self._appointed: list[
            _Appointed
        ] = []  # steps ascending: another one may follow before the first is reached
        self._last_step = -1
        self._phase = SchedulePhase.STARTING
        self._pace = Pace(0, FIRST_EVERY)  # STARTING: `first` counts the steps that are done; LOOSE: 0
        self._begun = False

    @property
    def phase(self) -> SchedulePhase:
        """Where the steps come from now."""
        return self._phase

    @property
    def every(self) -> int:
        """Steps between two checkpoints now."""
        return self._pace.every

    def choose(self, *, auto: bool) -> None:
        """Say whether it decides. Training thread, before the first step."""
        self._auto = auto

    def reach(self, step: int, shorten: Callable[[int], int] = lambda every: every) -> bool:
        """Training has done `step`; whether it is time to save. Training thread.

        Args:
            step: Not below the one before.
            shorten: The interval for now, from the usual one: shorter for a while after a notice.
        """
        with self._changed:
            if not self._begun:
                self._begun = True
                if self._phase is SchedulePhase.STARTING:
                    self._pace = Pace(_multiple(step + FIRST_EVERY, FIRST_EVERY), FIRST_EVERY)
            self._last_step = max(self._last_step, step)
            self._await(step)
            while self._appointed and step >= self._appointed[0].step:
                self._pace, self._phase = self._appointed.pop(0).pace, SchedulePhase.PACED
            return self._is_time(step, shorten(self._pace.every))

    def heard(self, word: PaceWord, step: int, number: int, body: Mapping[str, Any]) -> Reply | None:
        """The stager has said something of `step`. Link's thread.

        Returns:
            What to answer; None: nothing.

        Raises:
            ProtocolError: The body does not hold what it should.
        """
        pace = Pace.from_json(body) if word is PaceWord.APPOINTED else None
        with self._changed:
            promise, reply = self._promise, None
            if not self._auto:
                mine = 'it saves at its own steps, not by every="auto"'
                reply = Reply(self._last_step + 1, mine) if word is PaceWord.PROPOSED else None
            elif word is PaceWord.PROPOSED:
                self._promise = None if step <= self._last_step else _Promise(step, number)
                reply = Reply(self._last_step + 1)
            elif pace is not None:
                if promise is not None and promise.number == number:
                    self._promise = None
                    self._appointed.append(_Appointed(promise.step, pace))
                else:
                    reply = Reply(self._last_step + 1, f"it waited in vain at step {step}, and trains on")
            else:
                self._promise = None
                if word is PaceWord.LOOSE:
                    self._loosen()
            self._changed.notify_all()
            return reply

    def end(self) -> None:
        """Nothing more is heard: the stager is lost, or the job is over. Any thread."""
        with self._changed:
            self._promise = None
            self._loosen()
            self._changed.notify_all()

    def _is_time(self, step: int, every: int) -> bool:
        """The lock is held."""
        match self._phase:
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

    def _await(self, step: int) -> None:
        """Until the promise is kept or withdrawn. The lock is held."""
        deadline = time.monotonic() + self._wait_seconds_max
        while self._promise is not None and step >= self._promise.step:
            left = deadline - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                self._promise = (
                    None  # if it is said to hold after all, this rank refuses, and all are made LOOSE
                )
                return

    def _loosen(self) -> None:
        """The lock is held. Who was never paced stays as it is: what others may hold has its steps among those."""
        self._appointed.clear()
        if self._phase is SchedulePhase.PACED:
            self._phase = SchedulePhase.LOOSE
            self._pace = Pace(0, 1 << (min(self._pace.every, EVERY_MAX) - 1).bit_length())


def _multiple(least: int, of: int) -> int:
    """The first multiple of `of` that is not below `least`."""
    return -(-least // of) * of
