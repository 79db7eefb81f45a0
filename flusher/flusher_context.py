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
    """Made once, when the run is claimed.

    Attributes:
        lease: The claim on it; nothing is changed in a run that is another's.
        best: The rule by which the best checkpoints are kept; None: by none.
        share: Which of several flushers of the run this one is.
    """

    store: Store
    lease: WriterLease
    inbox: Inbox
    events: EventLog
    best: BestRule | None = None
    share: ShareNumber = WHOLE
