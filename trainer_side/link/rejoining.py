"""Reconnects a rank that has lost its stager: tries the same address until a stager answers.

    begin ─► a thread: connect ─ HELLO ─ WELCOME ─► found: the link's thread takes port and welcome
               ▲          ├── refused, unreachable, or the stager of another run ── pause: 1, 2, 4 … 30 s ┐
               │          └── the launcher has restarted the job ── the end         (at once: next generation)
               └──────────────────────────────────────────────────────────────────────────────────────────┘

All ranks must reach the new stager as the same start of the job, without messages among them. Each start has a number,
its generation; the first is 0. A rank tries the generation after the one that it has lost, and the next one if a stager
that admitted a generation is lost, or says that the generation is over. All ranks therefore end at the highest one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import ConfigError, HoldfastError
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from holdfast.wire.welcome import Welcome
from trainer_side.background_thread import BackgroundThread, ThreadDied
from trainer_side.link.greeting import GreetedStager, greet
from trainer_side.link.job_state import JobState
from trainer_side.ranks.ports import GenerationOver, StagerPort, StartReplaced

_log = logging.getLogger("holdfast.trainer.link")

_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 1.0, 30.0
_PAUSE_SECONDS_MAX_HELD = 4.0  # while a share may wait for the next process of one of several stagers
_WARNING_SECONDS = 300.0
_GENERATIONS_AT_ONCE_MAX = 64  # without a pause: a stager remembers which ones are over
_POLL_SECONDS = 0.01
_DISCONNECT_SECONDS_MAX = 1.0


class Reconnect(NamedTuple):
    """How a rank reconnects to its stager."""

    connect: Callable[[int], StagerPort]  # as this generation of the job's start (`World.reconnect`)
    # Returns the newest attempt with a checkpoint in the run, 0 without one. Called in the search thread of rank 0
    # alone; raises `StoreError`.
    newest_attempt: Callable[[], int]


class RejoinedStager(NamedTuple):
    """A stager that has admitted this rank again, and how long and how often the rank had tried."""

    greeted: GreetedStager
    seconds: float
    tries: int


class Rejoining:
    """The search for a stager. `begin`, `poll` and `end` belong to the link's thread.

    Args:
        start_seconds_max: Limit for the WELCOME of a stager that was reached.
        last_step: Returns the last step that training has done; -1: none. For warnings.
        fallback_text: Where checkpoints are kept meanwhile, as a sentence; empty: nowhere.
    """

    def __init__(
        self,
        reconnect: Reconnect,
        job: JobState,
        *,
        start_seconds_max: float,
        last_step: Callable[[], int],
        fallback_text: str,
    ) -> None:
        self._reconnect, self._job, self._rank = reconnect, job, job.rank
        self._start_seconds_max = start_seconds_max
        self._last_step = last_step
        self._fallback_text = fallback_text
        self._generation = 0
        self._found: queue.SimpleQueue[RejoinedStager | ThreadDied] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._before: Welcome | None = None
        self._last_logged = ""

    def begin(self, before: Welcome) -> None:
        """Start the search. `before`: The WELCOME of the lost stager."""
        self._before, self._last_logged = before, ""
        self._generation += 1
        task = "tries to reach the stager again"
        BackgroundThread(
            "holdfast-rejoin", self._search, rank=self._rank, task=task, on_death=self._found.put
        ).start()

    def poll(self) -> RejoinedStager | None:
        """Return the stager once it is found; never waits. ThreadDied: a bug has ended the search."""
        try:
            found = self._found.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, ThreadDied):
            raise found
        return found

    def end(self) -> None:
        """End the search; leave a stager that was found and not used."""
        self._ended.set()
        self._discard_found()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _search(self) -> None:
        begun = warned_at = time.monotonic()
        tries, immediate_tries, pause_seconds = 0, 0, _PAUSE_SECONDS_MIN
        while not self._ended.is_set():
            tries += 1
            generation = self._generation
            try:
                greeted = self._connect_once()
            except GenerationOver as over:
                self._generation = max(self._generation, generation + 1)
                immediate_tries += 1
                if immediate_tries <= _GENERATIONS_AT_ONCE_MAX:
                    continue
                self._log_once(over)
            except StartReplaced as replaced:
                _log.error(
                    "rank %d: no checkpoints are taken in this start any more: %s", self._rank, replaced
                )
                return
            except HoldfastError as error:
                self._log_once(error)
            else:
                self._found.put(RejoinedStager(greeted, time.monotonic() - begun, tries))
                if self._ended.is_set():  # `poll` is not called any more
                    self._discard_found()
                return
            immediate_tries = 0
            if self._rank == 0 and time.monotonic() - warned_at >= _WARNING_SECONDS:
                warned_at = time.monotonic()
                _log.warning(
                    "the stager has been lost for %.0f min (%d tries to reach it; the last: %s); %s",
                    (warned_at - begun) / 60,
                    tries,
                    self._last_logged,
                    self._describe_risk(),
                )
            self._ended.wait(pause_seconds)
            pause_seconds = min(self._pause_seconds_max(time.monotonic() - begun), 2 * pause_seconds)

    def _pause_seconds_max(self, seconds: float) -> float:
        """Return the longest pause after a search of `seconds`."""
        is_share = self._before is not None and self._before.shares > 1
        if is_share and seconds < LOST_STAGER_SECONDS_MAX:
            return min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS_MAX_HELD)
        return _PAUSE_SECONDS_MAX

    def _connect_once(self) -> GreetedStager:
        port = self._reconnect.connect(self._generation)
        try:
            return self._greet(port)
        except HoldfastError:
            self._generation += 1  # this one was admitted, and the stager counts its messages
            port.disconnect(_DISCONNECT_SECONDS_MAX)
            raise

    def _greet(self, port: StagerPort) -> GreetedStager:
        greeted = greet(
            port,
            ranks=self._job.ranks,
            seconds_max=self._start_seconds_max,
            pause_seconds=_POLL_SECONDS,
            is_cancelled=self._ended.is_set,
        )
        before, welcome = self._before, greeted.welcome
        assert before is not None
        if _describe_settings(welcome) != _describe_settings(before):
            raise ConfigError(
                f"the stager that answers now writes {_describe_settings(welcome)}, expected "
                f"{_describe_settings(before)} as the one that this job has lost; start the stager with the same "
                "settings, or start the job again"
            )
        if self._rank == 0 and (newest := self._reconnect.newest_attempt()) > before.attempt:
            # Perhaps no stager is left that knows both starts, but the run knows them.
            raise StartReplaced(
                f"{before.store_url} has a checkpoint of attempt {newest}, and this job was attempt {before.attempt} "
                "until it lost its stager: another start of it has gone on since"
            )
        return greeted

    def _log_once(self, error: HoldfastError) -> None:
        """Log each cause once; rank 0 would otherwise repeat it for hours."""
        if str(error) != self._last_logged:
            self._last_logged = str(error)
            _log.info("rank %d does not reach the stager yet: %s", self._rank, error)

    def _describe_risk(self) -> str:
        """Say which training would be lost if the job ended now."""
        if self._fallback_text:
            return self._fallback_text
        done, durable, staged = self._last_step(), self._job.durable_step, self._job.staged_step
        parts = [f"training has done step {done}"] if done >= 0 else []
        parts.append(
            f"step {durable} is durable" if durable >= 0 else "no step of this job is known to be durable"
        )
        if staged > durable:
            parts.append(f"step {staged} was staged on the lost stager")
        return f"{', '.join(parts)}; what was trained since is lost if the job ends now"

    def _discard_found(self) -> None:
        try:
            found = self._found.get_nowait()
        except queue.Empty:
            return
        if isinstance(found, RejoinedStager):
            found.greeted.port.disconnect(_DISCONNECT_SECONDS_MAX)


def _describe_settings(welcome: Welcome) -> str:
    share = f", share {welcome.share}/{welcome.shares}," if welcome.shares > 1 else ""
    return f"{welcome.store_url}{share} in chunks of {welcome.chunk_bytes} bytes"
