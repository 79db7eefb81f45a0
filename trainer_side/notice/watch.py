"""The watch: one thread that polls the sources every few seconds, and passes on new notices.

    sources.poll() ── new ──► on_notice (the link: NOTICE to the stager)
                   └─ SourceError ──► logged once, until the source answers again

A source returns the same notice at each poll; the watch passes each on once. No failure of a source reaches the
training: each poll is bounded, and an error is one log line. One rank of a machine polls the metadata servers
(`is_first_on_machine`); each process watches its own signals.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.notices.notice import Notice
from trainer_side.background_thread import BackgroundThread
from trainer_side.notice.lost_siblings import LostSiblings
from trainer_side.notice.signals import SignalSource

_log = logging.getLogger("holdfast.trainer.watch")

_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID")
_CLOSE_SECONDS_MAX = 5.0


class SourceError(HoldfastError):
    """A source could not be polled, or gave an unreadable answer. Never leaves the watch."""

    code = "watch"


class NoticeSource(Protocol):
    """A source of preemption notices. For the watch's thread alone."""

    name: str

    def poll(self) -> list[Notice]:
        """Return the notices that the source shows now; mostly none.

        SourceError: it did not answer in time, refused, or gave an unreadable answer.
        """
        ...


def is_first_on_machine(environ: Mapping[str, str]) -> bool:
    """Whether this is the first process of the job on its machine, according to the launcher; True if unknown."""
    for name in _LOCAL_RANK_VARIABLES:
        if name in environ:
            return environ[name].strip() == "0"
    return True


class NoticeWatch:
    """Polls the sources of one rank every `seconds`. In its thread it calls `find`, which makes the sources and may
    query a cloud, and `on_notice` with each new notice. `signals`: Further sources, which put an item into `wakes`.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[NoticeSource]],
        on_notice: Callable[[Notice], None],
        *,
        rank: int,
        seconds: float,
        signals: Sequence[SignalSource],
        wakes: SimpleQueue[None],
        siblings: LostSiblings | None = None,
    ) -> None:
        self._find, self._on_notice, self._rank, self._seconds = find, on_notice, rank, seconds
        self._signals, self._wakes, self._siblings = signals, wakes, siblings
        self._passed_on: set[tuple[str, str, str, int | None]] = set()
        self._failing: set[str] = set()
        self.polls: dict[str, int] = {}  # polls of each source, by name
        self.failures: dict[str, int] = {}  # failed polls of each source, by name
        self._closing = threading.Event()
        self._thread = BackgroundThread(
            "holdfast-watch",
            self._run,
            rank=rank,
            task="listens for preemption notices, of which this rank receives no further ones",
            on_death=lambda _: None,  # checkpoints are not affected
        )

    def start(self) -> None:
        self._thread.start()

    def signal_notice(self) -> Notice | None:
        """Return the notice of a signal that has arrived, even if the thread has not handled it yet. Main thread."""
        return next((notice for source in self._signals for notice in source.poll()), None)

    def close(self) -> None:
        """End the thread, waiting at most as long as a poll may take. The signals' handlers stay. Main thread."""
        for source in self._signals:
            source.close()
        if self._siblings is not None:
            self._siblings.close()
        self._closing.set()
        self._wakes.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS_MAX)

    def _run(self) -> None:
        try:
            sources: list[NoticeSource] = [*self._signals, *self._find()]
        except SourceError as error:
            _log.error("rank %d: no metadata server is watched, only signals are: %s", self._rank, error)
            sources = [*self._signals]
        due = 0.0
        while not self._closing.is_set():
            # Signals are passed on at once; servers are polled on their own schedule.
            now = time.monotonic()
            servers = now >= due
            if servers:
                due = now + self._seconds
            polled: Sequence[NoticeSource] = sources if servers else self._signals
            for source in polled:
                self._poll(source)
            try:
                self._wakes.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                continue

    def _poll(self, source: NoticeSource) -> None:
        self.polls[source.name] = self.polls.get(source.name, 0) + 1
        try:
            notices = source.poll()
        except Exception as error:  # noqa: BLE001 - no answer of a server may disturb the training
            self.failures[source.name] = self.failures.get(source.name, 0) + 1
            if source.name not in self._failing:
                self._failing.add(source.name)
                cause = error if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"
                _log.warning(
                    "rank %d: the watch cannot ask %s, and retries every %g s; until it succeeds, no notice of that "
                    "source is received: %s",
                    self._rank,
                    source.name,
                    self._seconds,
                    cause,
                )
            return
        if source.name in self._failing:
            self._failing.discard(source.name)
            _log.warning("rank %d: the watch reaches %s again", self._rank, source.name)
        for notice in notices:
            until = None if notice.deadline_unix is None else round(notice.deadline_unix)
            key = (notice.source, notice.kind.value, notice.said_by, until)
            if key not in self._passed_on:
                self._passed_on.add(key)
                _log.warning("rank %d received a preemption notice: %s", self._rank, notice.sentence())
                self._on_notice(notice)
