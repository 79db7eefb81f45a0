"""The objects that every part of the stager works with."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.telemetry.events import EventLog
from stager.doubt_handler import DoubtHandler
from stager.flusher_line import FlusherLine
from stager.notices import Notices
from stager.payloads import Payloads
from stager.trainers import Trainers


@dataclass(frozen=True)
class StagerContext:
    """Made once by the `StagerService`.

    Attributes:
        notices: Hears what concerns a machine's end, and how checkpoints end.
    """

    line: FlusherLine
    trainers: Trainers
    payloads: Payloads
    notices: Notices
    doubts: DoubtHandler
    events: EventLog
