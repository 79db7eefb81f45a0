"""A rank's side of the agreement that lets all ranks act at the same step, without a collective operation.

    link's thread      handle(proposed 40) ─► not passed: promised
                       handle(appointed 40) ─► agreed           handle(called off) ─► the promise ends
    training thread    reach(39) ─► nothing     reach(40) ─► waits until agreed, or the promise ends ─► due ones

The decider's side is holdfast/notices/step_agreement.py. A rank that has promised a step waits there for the decider's
answer, which mostly arrives long before. An agreed step stays agreed even if another one is proposed later, since
another rank may already have reached it.
"""

from __future__ import annotations

import threading
import time
from typing import Generic, NamedTuple, TypeVar

from holdfast.notices.messages import Announcement, AnnouncementKind

Agreed = TypeVar("Agreed")


class _Promise(NamedTuple):
    """A promise not to go past `step` until the decider answers. `number` is the number of the proposal."""

    step: int
    number: int


class PromisedSteps(Generic[Agreed]):
    """The promises and agreements of this rank. The caller of each method holds `lock`."""

    def __init__(self, wait_seconds_max: float) -> None:
        self._wait_seconds_max = wait_seconds_max
        # Guards the promises, and the related state of their user; `reach` releases it while it waits.
        self.lock = threading.Condition()
        self.last_step = -1  # last step that training has done; -1: none
        self._promise: _Promise | None = None
        self._appointed: list[tuple[int, Agreed]] = []  # each is due at its step, or at the first one above

    @property
    def pending(self) -> bool:
        """Whether a step is promised, or appointed and not reached yet."""
        return self._promise is not None or bool(self._appointed)

    def waits_at(self, step: int) -> bool:
        """Whether training would wait at `step` for the decider's answer."""
        return self._promise is not None and step >= self._promise.step

    def handle(self, announcement: Announcement, agreed: Agreed | None = None) -> bool:
        """Take an announcement; `agreed`: the content of its body if a step is appointed. Link's thread. Returns False
        if the appointed step was not promised any more: this rank may have passed it.
        """
        self.lock.notify_all()
        if announcement.kind is AnnouncementKind.PROPOSED:
            passed = announcement.step <= self.last_step
            self._promise = None if passed else _Promise(announcement.step, announcement.number)
        elif announcement.kind is AnnouncementKind.LOOSE:
            self._promise = None
        elif announcement.kind is AnnouncementKind.CALLED_OFF:
            if self._promise is not None and self._promise.number == announcement.number:
                self._promise = None
        elif self._promise != (announcement.step, announcement.number) or agreed is None:
            return False
        else:
            self._promise = None
            self._appointed.append((announcement.step, agreed))
        return True

    def reach(self, step: int) -> list[Agreed]:
        """Note that training has done `step`; return the agreements due now, in their order. Training thread."""
        self.last_step = max(self.last_step, step)
        if not self.pending:
            return []
        deadline = time.monotonic() + self._wait_seconds_max
        while self.waits_at(step):
            left = deadline - time.monotonic()
            if left <= 0 or not self.lock.wait(left):
                self._promise = None
        due = [agreed for at, agreed in self._appointed if step >= at]
        self._appointed = [(at, agreed) for at, agreed in self._appointed if step < at]
        return due

    def end(self, *, forget_appointed: bool = False) -> None:
        """End the promise, since the decider answers no more: training does not wait for it. Any thread."""
        self._promise = None
        if forget_appointed:
            self._appointed.clear()
        self.lock.notify_all()
