"""The objects that every part of a flusher works with."""

from __future__ import annotations

from dataclasses import dataclass

from flusher.workers import Inbox
from flusher.writer_lease import WriterLease
from holdfast.image.best_rule import BestRule
from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.store.base import Store
from holdfast.telemetry.events import EventLog


@dataclass(frozen=True)
class FlusherContext:
    """Made once, when the lease is acquired.

    Attributes:
        lease: The lease on the run; a flusher that lost it must change nothing there.
        best: The rule by which the best checkpoints are kept; None: no such rule.
        share: Which of the run's flushers this one is.
    """

    store: Store
    lease: WriterLease
    inbox: Inbox
    events: EventLog
    best: BestRule | None = None
    share: ShareNumber = WHOLE
