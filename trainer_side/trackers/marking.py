"""Sends marks about checkpoints to the trackers of a run, on its own thread. Rank 0.

    events of this rank ─► handle_event (any thread) ─► queue ─► the thread ─► mark() of each tracker
                                                         │          └─ one raises: one log line, and no further marks
                                                         └─ full, because a tracker hangs: drop the mark, and warn once

Training waits for trackers only at its end, and for a few seconds at most. The code that saves knows only the events.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trainer_side.trackers.tracker import Mark, Tracker

_log = logging.getLogger("holdfast.trainer")

_QUEUED_MAX = 1000
_TURN_SECONDS = 1.0
_END_SECONDS_MAX = 5.0  # limit for trackers at the end of training
_SAVES_MAX = 16  # whose begin is remembered


class MarkSender:
    """Turns events into marks, and sends these to the trackers.

    `turn_seconds`: Between calls of `Tracker.mark` without new marks, in which it can retry delayed ones.
    """

    def __init__(
        self, *, turn_seconds: float = _TURN_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._turn_seconds, self._clock = turn_seconds, clock
        self._trackers: list[Tracker] = []
        self._queue: queue.Queue[tuple[Tracker | None, Mark] | None] = queue.Queue(_QUEUED_MAX)
        self._saved_at: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-trackers", daemon=True)
        self._is_full = self._needs_flush = False

    def add(self, tracker: Tracker, marks: Sequence[Mark] = ()) -> None:
        """Add a tracker; only this one gets `marks`. Training thread."""
        self._trackers = [*self._trackers, tracker]
        for mark in marks:
            self._enqueue(tracker, mark)
        if self._thread.ident is None:
            self._thread.start()

    def handle_event(self, event: str, fields: Mapping[str, Any], step: int | None) -> None:
        """Queue the mark of an event of this rank, if it has one. Any thread."""
        if step is None:
            return
        if event == "save":
            self._saved_at[step] = self._clock()
            for old in list(self._saved_at)[:-_SAVES_MAX]:
                self._saved_at.pop(old, None)
            self._needs_flush = True
            self._enqueue(None, Mark("stall_seconds", step, float(fields["cst_seconds"])))
        elif event in ("staged", "durable") and (seconds := fields.get(f"{event}_seconds")) is not None:
            self._enqueue(None, Mark(f"{event}_seconds", step, float(seconds)))
        elif event == "complete" and (saved_at := self._saved_at.pop(step, None)) is not None:
            self._enqueue(None, Mark("kept_seconds", step, self._clock() - saved_at))

    def close(self) -> None:
        """Send queued marks, for a few seconds at most. Training thread."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        if self._thread.ident is not None and not self._ended.wait(_END_SECONDS_MAX):
            unsent = self._queue.qsize()
            _log.warning(
                "an experiment tracker does not answer; %d marks about checkpoints are not sent", unsent
            )

    def _enqueue(self, tracker: Tracker | None, mark: Mark) -> None:
        try:
            self._queue.put_nowait((tracker, mark))
        except queue.Full:
            if not self._is_full:
                self._is_full = True
                _log.warning(
                    "an experiment tracker has not answered since %d marks about checkpoints; later ones are left out",
                    _QUEUED_MAX,
                )

    def _run(self) -> None:
        is_running = True
        while is_running:
            found, is_running = self._drain()
            needs_flush, self._needs_flush = self._needs_flush, False
            for tracker in self._trackers:
                marks = [mark for of, mark in found if of in (None, tracker)]
                self._call(tracker, partial(tracker.mark, marks))
                if needs_flush:
                    self._call(tracker, tracker.flush)
        for tracker in self._trackers:
            self._call(tracker, tracker.end)
        self._ended.set()

    def _drain(self) -> tuple[list[tuple[Tracker | None, Mark]], bool]:
        """Return all queued marks, and whether more may come."""
        found = []
        with contextlib.suppress(queue.Empty):
            one = self._queue.get(timeout=self._turn_seconds)
            while one is not None:
                found.append(one)
                one = self._queue.get_nowait()
            return found, False
        return found, True

    def _call(self, tracker: Tracker, call: Callable[[], None]) -> None:
        if tracker not in self._trackers:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a failing tracker must not end training
            self._trackers = [one for one in self._trackers if one is not tracker]
            what = f"{type(error).__name__}: {error}"
            _log.warning(
                "the experiment tracker %s gets no more marks about checkpoints: %s", tracker.kind, what
            )
            _log.debug("the tracker failed", exc_info=True)
