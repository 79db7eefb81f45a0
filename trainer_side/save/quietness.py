"""Shows that a state stays as it was at `save()` until its next update; otherwise no copy is left behind the gate.

    save() ─► its copy is finished inside ─► first update, or next save: every byte as in the copy? ─► quiet
                                                                                └ no ─► distrusted, for good
    quiet ─► copies stay behind the gate: 7 8 9 … ─► a save that the step draws, about one in 50: as at first

The hooks of optimizers (hook_proof.py), counters and sampled words (tearing.py) do not show a few elements that are
written through `.data` or numpy. A rank that finds some tells all ranks: each of them copies inside `save()` from then
on, and what was copied behind the gate since its last comparison is doubtful. A slice that is quickly copied never
stays behind the gate.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from holdfast.image.replicas import first_row
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from trainer_side.ledger import Ledger
from trainer_side.save.staging import Staging
from trainer_side.save.tearing import SavedInstant

_log = logging.getLogger("holdfast.trainer.gate")

_COMPARED_EVERY = 50  # saves, on average
_RATES_KEPT = 8


class _ExpectedCopy(NamedTuple):
    """A save whose copy was finished inside `save()`, and is compared before anything may change it."""

    instant: SavedInstant
    area: Staging
    is_whole: Callable[[], bool]


class Quietness:
    """What is known of changes that nobody counts. Training thread, unless a method says otherwise.

    Args:
        rank: This rank.
        mode: The setting `copy`.
        inside_ms_max: The setting `copy_inside_ms_max`.
        tell: Tells all ranks of a doubt. Any thread.
        ledger: Counts comparisons.
        events: Event log.
    """

    def __init__(
        self,
        rank: int,
        *,
        mode: Literal["auto", "inside"],
        inside_ms_max: float,
        tell: Callable[[Doubt], None],
        ledger: Ledger,
        events: EventLog,
    ) -> None:
        self._rank, self._mode, self._inside_seconds_max = rank, mode, inside_ms_max / 1000
        self._tell, self._ledger, self._events = tell, ledger, events
        self._guard = threading.Lock()
        self._distrusted = False
        self._behind: tuple[int, int] | None = (
            None  # first and last step since the last comparison that was good
        )
        self._rates: deque[float] = deque(maxlen=_RATES_KEPT)  # seconds for each byte of the slice
        self._awaited: _ExpectedCopy | None = None

    @staticmethod
    def is_drawn(step: int) -> bool:
        """Whether the save of this step is compared whole: drawn, so that no period of the training hides from it."""
        return first_row(step, _COMPARED_EVERY) == 0

    def copied(self, nbytes: int, seconds: float) -> None:
        """A slice was copied. Copy thread, before it opens the gate."""
        with self._guard:
            self._rates.append(seconds / max(1, nbytes))

    def is_inside(self, nbytes: int, *, on_device: bool) -> bool:
        """Whether a copy of so many bytes is finished inside `save()`, whatever is proven.

        Args:
            nbytes: Of the slice.
            on_device: Whether live tensors of it are on a device: however quick their copy is, it comes behind all that
                is queued there, and `save()` would wait for that.
        """
        with self._guard:
            if self._mode == "inside" or self._distrusted:
                return True
            if on_device:
                return False
            return bool(self._rates) and statistics.median(self._rates) * nbytes <= self._inside_seconds_max

    def leave_behind(self, step: int) -> bool:
        """The copy of this step may stay behind the gate; False: another rank has said meanwhile that it may not."""
        with self._guard:
            if not self._distrusted:
                self._behind = (step if self._behind is None else self._behind[0], step)
            return not self._distrusted

    def expect(self, instant: SavedInstant, area: Staging, is_whole: Callable[[], bool]) -> None:
        """The copy of this instant is going to be compared, if all of it came into the area."""
        self._awaited = _ExpectedCopy(instant, area, is_whole)

    @property
    def expects(self) -> bool:
        """Whether `compare` has something to do."""
        return self._awaited is not None

    def excused(self) -> None:
        """The script has waited for the copy: it may change the state by any means."""
        self._awaited = None

    def compare(self) -> bool:
        """Compare what is expected; returns whether all is as it was, except for what torch has counted.

        Before the first update after a save, or before the next save; no copy is under way. The area is as the copy has
        left it: only a later save takes it again.
        """
        awaited, self._awaited = self._awaited, None
        if awaited is None or not awaited.is_whole():
            return False
        begun, step = time.monotonic(), awaited.instant.step
        path = awaited.instant.changed_uncounted(awaited.area.memory)
        seconds = time.monotonic() - begun
        self._ledger.compared(seconds)
        told = {"seconds": seconds, "nbytes": awaited.area.nbytes, "changed": path}
        self._events.emit("compared", told, step=step)
        if not path:
            with self._guard:
                self._behind = None
            return True
        self.distrust(
            f"{path} was changed after save({step}), in a way that torch does not count, and not in a step of its "
            "optimizer"
        )
        return False

    def distrust(self, reason: str) -> None:
        """This rank has seen a change that the gate does not hold back: say so to all ranks. Any thread."""
        doubt = self._lose_trust(reason)
        if doubt is None:
            return
        _log.warning(
            "rank %d: %s. From now on save() returns only when its copy is done, on all ranks%s. To be faster next "
            "time, call checkpointer.wait_copied() before such changes, or make them in "
            "`with checkpointer.changing():`",
            self._rank,
            reason,
            f"; {doubt.sentence()}" if doubt.steps else "",
        )
        self._tell(doubt)

    def hear(self, doubt: Doubt) -> None:
        """A rank has lost its trust. Link's or council's thread."""
        mine = self._lose_trust(doubt.reason)
        if mine is None:
            return
        _log.warning(
            "rank %d: save() returns only when its copy is done from now on, as rank %d has seen that %s",
            self._rank,
            doubt.rank,
            doubt.reason,
        )
        if mine.steps:
            self._tell(mine)

    def _lose_trust(self, reason: str) -> Doubt | None:
        """What all ranks must hear; None if this rank has lost its trust before."""
        with self._guard:
            if self._distrusted:
                return None
            self._distrusted = True
            behind, self._behind = self._behind, None
        self._events.emit("distrusted", {"reason": reason, "steps": list(behind or ())})
        return Doubt(self._rank, behind, reason)
