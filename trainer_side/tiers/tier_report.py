"""What becomes of each step in each tier of this rank: counted, in the event log, and a warning for each new cause."""

from __future__ import annotations

import logging
import threading

from holdfast.errors import HoldfastError
from holdfast.telemetry.causes import STATES_DIFFER, DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from trainer_side.tiers.lane import PartOutcome
from trainer_side.tiers.tally import Order, StepVerdict
from trainer_side.tiers.tier import KeptSteps, Tier

_log = logging.getLogger("holdfast.trainer.tiers")


class TierReport:
    """See the module. Any thread.

    Args:
        rank: This rank, for messages.
        ledger: Counts slices.
        events: Event log of this rank.

    Attributes:
        events: As given.
    """

    def __init__(self, rank: int, ledger: KeptSteps, events: EventLog) -> None:
        self.events = events
        self._rank, self._ledger = rank, ledger
        self._guard = threading.Lock()
        self._warned: set[str] = set()

    def kept(self, tier: Tier, outcome: PartOutcome) -> None:
        keeping = outcome.keeping
        self._ledger.kept(tier.name)
        self.events.emit(
            "kept",
            {
                "tier": tier.name,
                "nearness": tier.nearness.value,
                "how": tier.how,
                "slice_bytes": sum(frame.nbytes for frame in keeping.frames),
                "written_bytes": outcome.written_bytes,
                "seconds": outcome.seconds,
                "crc_seconds": keeping.sum_seconds,
                "direct": keeping.source_is_slot == outcome.tier,
            },
            step=keeping.step,
        )

    def skipped(self, tier: Tier, order: Order, reason: Reason, *, counted: bool = True) -> None:
        """A step is not kept. `counted`: False if this rank did not save the step at all."""
        cause, step = reason.cause, order[1]
        if cause == DeclineCause.RESTS:
            return
        fields = {"tier": tier.name, "reason": reason.text, "cause": cause}
        self.events.emit("skipped_tier", fields, step=step)
        if not counted:
            return
        self._ledger.skipped(tier.name, cause)
        if (
            self._is_news(f"{tier.name}: {cause}") and cause != "failed"
        ):  # whoever met the error has logged it
            _log.warning("rank %d: step %d is not kept in tier %s: %s", self._rank, step, tier.name, reason)

    def no_slot(self, tier: Tier, step: int, error: HoldfastError) -> None:
        if self._is_news(str(error)):
            _log.error("rank %d: tier %s gives no slot for step %d: %s", self._rank, tier.name, step, error)

    def judged(self, tier: Tier, verdict: StepVerdict) -> None:
        """A step is complete in this tier on every rank, or void."""
        (_, step), why = verdict.order, verdict.why
        if why.cause == STATES_DIFFER:
            self._ledger.refused(step, why)
        if verdict.complete:
            self.events.emit("complete", {"tier": tier.name, "why": why.text}, step=step)
        elif why.cause != DeclineCause.RESTS:
            self.events.emit("void", {"tier": tier.name, "why": why.text, "cause": why.cause}, step=step)

    def _is_news(self, text: str) -> bool:
        with self._guard:
            news = text not in self._warned
            self._warned.add(text)
        return news
