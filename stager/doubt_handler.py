"""Records a rank's doubt about its copies beside the ring, then tells the flusher and all ranks.

If a process dies in between, the next flusher finds the record beside the ring (holdfast/ring/doubts.py). The ranks
are told last: a rank that has copied outside save() until then answers with a doubt about its own steps.
"""

from __future__ import annotations

import logging

from holdfast.errors import ConfigError, ProtocolError, StoreError
from holdfast.faultpoint import Point, reach
from holdfast.ring.doubts import DoubtedSteps, read_doubts, write_doubts
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Frame, Kind
from stager.flusher_line import FlusherConnection
from stager.trainers import Trainers

_log = logging.getLogger("holdfast.stager")


class DoubtHandler:
    """Handles DOUBT. Only for the loop's thread."""

    def __init__(self, line: FlusherConnection, trainers: Trainers, events: EventLog) -> None:
        self._line, self._trainers, self._events = line, trainers, events
        self._known: list[DoubtedSteps] = []

    def handle(self, rank: int, frame: Frame) -> None:
        """Handle DOUBT of a rank. Raises `ProtocolError`."""
        doubt = Doubt.from_frame(frame)
        if doubt.rank != rank:
            raise ProtocolError(f"rank {rank} sent DOUBT in the name of rank {doubt.rank}")
        attempt = self._line.flusher.attempt
        suffix = f"; {doubt.sentence()}" if doubt.steps else ""
        _log.warning("rank %d: %s%s. All ranks copy inside save() from now on", rank, doubt.reason, suffix)
        fields = {"of_rank": rank, "steps": list(doubt.steps or ()), "reason": doubt.reason}
        self._events.emit("doubt", fields)
        if doubt.steps is not None:
            written = doubt._replace(earlier_attempts=())
            self._known += [DoubtedSteps(one, written) for one in (*doubt.earlier_attempts, attempt)]
            reach(Point.DOUBT_HEARD)
            self._write()
            reach(Point.DOUBT_WRITTEN)
            self._line.send("doubt")
        self._trainers.send_all(doubt.to_frame(Kind.DOUBTED, attempt=attempt))

    def resend(self) -> None:
        """Tell the next flusher all doubts of this job."""
        if self._known:
            self._write()
            self._line.send("doubt")

    def _write(self) -> None:
        directory = self._line.flusher.ring.directory
        before = [one for one in read_doubts(directory) if one not in self._known]  # of earlier jobs
        try:
            write_doubts(directory, [*before, *self._known])
        except (StoreError, ConfigError) as error:
            _log.error("which steps are doubtful is not written down, so no manifest is marked: %s", error)
