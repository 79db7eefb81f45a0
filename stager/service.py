"""Serves one job: the loop from its first rank to the last durable step, and the refusal of a start.

    RankHandler ── messages, payloads, silent or dead ranks ─┐               ┌─► Trainers     credits, verdicts
    FlusherHandler ── began, freed, durable, failed ─────────┼─► Session ────┼─► Payloads     receives
    the clock ── ticks ──────────────────────────────────────┘   (Actions)   ├─► Ring         FILLING, FULL, FREE
                                                                             └─► FlusherConnection  doorbell

One thread, which never blocks on a peer; an idle loop sleeps on the flusher's socket, longer each time. The trainers do
not notice the death of a flusher: the stager finds another one, and tells it what the session knows. The loop ends when
every trainer has left or is dead; the stager then tells the flusher to finish, and waits for it. A stager that is told
to stop declines every new step, and ends once no step in flight can become staged. It tells the remaining ranks how
their steps end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.config import StagerConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.image.shares import WHOLE
from holdfast.process import yield_to_training
from holdfast.ring.ring_keeper import is_ring_kept
from holdfast.telemetry.events import EventLog
from holdfast.telemetry.metrics_page import serve_metrics
from holdfast.telemetry.status_document import RankStatus, Transport
from holdfast.telemetry.status_socket import serve_status
from holdfast.telemetry.status_state import StatusState
from holdfast.telemetry.tracing import export_spans
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.welcome import Welcome
from stager.actions import Actions
from stager.doubt_handler import DoubtHandler
from stager.flusher_handler import FlusherHandler, slot_owners
from stager.flusher_line import FlusherConnection
from stager.flusher_process import Flusher, attach, reap
from stager.notices import Notices
from stager.payloads import Payloads
from stager.previous_jobs import PreviousJobs, inherited_steps, newest_in
from stager.proof_handler import ProofHandler
from stager.rank_handler import RankHandler
from stager.segments import SegmentList
from stager.session.session import Session
from stager.session.session_messages import FlusherLost, Tick
from stager.trainers import Trainers
from stager.trainers_port import TrainersPort

_log = logging.getLogger("holdfast.stager")

_TICK_SECONDS = 0.25
_DRAIN_SECONDS_MAX = 600.0
_DRAIN_FAILURES_MAX = 8  # flushers in a row that did nothing, with pauses of half a minute in all
_PAUSE_SECONDS_MIN = 50e-6
_BUSY_PAUSE_SECONDS_MAX = 0.5e-3  # while bytes are in flight: a longer sleep would cost bandwidth
_IDLE_PAUSE_SECONDS_MAX = 5e-3
_PAUSE_PER_SECOND_WAITED = (
    0.02  # while a full ring waits for the store, frequent polls of the ranks find nothing
)
_REFUSAL_PAUSE_SECONDS = 5e-3
_FINAL_SEND_SECONDS_MAX = 2.0
_STREAMING_SECONDS = 0.02  # scattered payloads come in fragments that move only while we poll


class StagerService:
    """Serves one job. `is_stopping`: whether the stager was told to stop; called at each turn."""

    def __init__(
        self,
        config: StagerConfig,
        port: TrainersPort,
        flusher: Flusher,
        *,
        events: EventLog,
        is_stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock = config, clock
        self._port, self._is_stopping = port, is_stopping
        self._line = FlusherConnection(config, flusher, events=events, clock=clock)
        self._trainers = Trainers(port, rank_seconds_max=config.rank_seconds_max, clock=clock)
        self._payloads = Payloads(port, flusher.ring)
        free_slots, flusher_slots = slot_owners(flusher.ring)
        share = None if config.share == WHOLE else lambda layout: self._line.share_of(layout).chunks
        self._session = Session(
            ranks=port.ranks,
            free_slots=free_slots,
            flusher_slots=flusher_slots,
            offer_seconds_max=config.offer_seconds_max,
            chunk_seconds_max=config.chunk_seconds_max,
            on_divergence=config.on_divergence,
            share=share,
        )
        self._session.take_over(
            inherited_steps(flusher.ring, flusher.attempt), newest_in(flusher.ring, flusher.attempt)
        )
        self._notices = notices = Notices(
            config,
            self._trainers,
            lambda: [*self._actions.partly_staged(clock()), *self._session.in_flight(clock())],
            events,
            attempt=lambda: self._line.flusher.attempt,
            clock=clock,
        )
        doubts = DoubtHandler(self._line, self._trainers, events)
        self._actions = Actions(
            self._session, self._line, self._trainers, self._payloads, notices, events, clock=clock
        )
        proofs = ProofHandler(self._line, events, ranks=port.ranks)

        def resend() -> None:
            doubts.resend()
            proofs.resend()

        previous_jobs = PreviousJobs(
            config.start_seconds_max / 2, share=share, clock=clock
        )  # half: the ranks' wait for WELCOME has a limit, too
        self._rank_handler = RankHandler(
            config, port, self._actions, doubts, proofs, previous_jobs, clock=clock
        )
        self._flusher_handler = FlusherHandler(
            self._line, self._session, self._payloads, self._actions, resend
        )
        self._tick_at = 0.0
        self._active_at = 0.0
        self._pause_seconds = _PAUSE_SECONDS_MIN

    @property
    def lost_ranks(self) -> set[int]:
        """Trainers that did not leave: they died, were dropped, or were still present when the stager stopped."""
        return self._trainers.lost

    def rank_statuses(self) -> list[RankStatus]:
        """The state of each rank, for `holdfast status`. Any thread."""
        return self._trainers.statuses()

    def run(self) -> None:
        """Serve until every trainer has left, or this stager is stopping; then let the flusher finish. Raises
        `PeerLost`: one flusher after the other ended before every staged step was durable.
        """
        while not self._is_over():
            if self._poll_once():
                self._active_at = self._clock()
                self._pause_seconds = _PAUSE_SECONDS_MIN
            else:
                self._idle()
        self._finish()
        for rank in sorted(self._trainers.present):
            self._trainers.remove(rank, lost=True)

    def close(self) -> None:
        """Detach from ring and flusher, which keeps running."""
        self._payloads.close()
        self._flusher_handler.close()

    def _is_over(self) -> bool:
        if not self._trainers.present:
            return True
        if not self._is_stopping():
            return False
        self._session.stop()
        return not self._session.may_stage

    # -- one turn ------------------------------------------------------------------------------------------------

    def _poll_once(self) -> bool:
        """Poll ranks and flusher once; return whether there was any input."""
        had_input = self._rank_handler.poll()
        had_input |= self._flusher_handler.poll()
        self._flusher_handler.reattach()
        now = self._clock()
        if now >= self._tick_at:
            self._tick_at = now + _TICK_SECONDS
            self._tick(now)
        return had_input

    def _tick(self, now: float) -> None:
        reap()
        if self._line.lost_reason:
            self._actions.process(
                FlusherLost(self._line.lost_reason)
            )  # again: the reason may have become more precise
        self._actions.process(Tick())
        self._rank_handler.tick(now)

    def _idle(self) -> None:
        """Yield the core; wake when the flusher sends a message, or a rank does over TCP."""
        port_fd = self._port.fileno()
        if port_fd is not None:
            self._line.wait(_TICK_SECONDS, port_fd)
            return
        waited_seconds, streaming = self._clock() - self._active_at, self._rank_handler.streaming
        if streaming and waited_seconds < _STREAMING_SECONDS:
            time.sleep(0)
            return
        self._line.wait(self._pause_seconds)
        most = _IDLE_PAUSE_SECONDS_MAX if self._session.idle else _BUSY_PAUSE_SECONDS_MAX
        if not streaming:
            most = max(most, min(_IDLE_PAUSE_SECONDS_MAX, waited_seconds * _PAUSE_PER_SECOND_WAITED))
        self._pause_seconds = min(most, self._pause_seconds * 1.3)

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Wait until the flusher has made all staged checkpoints durable.

        Return earlier if ranks were lost or another stager leads, and the ring is kept: the next attempt waits for this
        process to end, and restores from the ring.
        """
        finish_sent_to: Flusher | None = None
        deadline = self._clock() + _DRAIN_SECONDS_MAX
        logged_held = ""
        while finish_sent_to is None or not self._flusher_handler.drained:
            is_settled = not (self._line.lost_reason or self._session.may_stage)
            # The lead may never publish a checkpoint, and ranks may wait to join again with another attempt.
            may_restart = bool(self.lost_ranks) or not self._config.share.is_lead
            if may_restart and is_settled and is_ring_kept(self._line.flusher.ring.directory):
                return
            # "finish" would end a checkpoint that still streams through a smaller ring and may become staged.
            if (
                finish_sent_to is not self._line.flusher
                and not self._line.lost_reason
                and not self._session.may_stage
            ):
                finish_sent_to = self._line.flusher
                self._line.send("finish", interrupted=bool(self.lost_ranks) or self._notices.is_terminating)
            if self._line.failures >= _DRAIN_FAILURES_MAX:
                raise self._drain_error()
            left_seconds = deadline - self._clock()
            if left_seconds <= 0:
                _log.error(
                    "the flusher (process %d) has not written all checkpoints within %g s; it continues alone",
                    self._line.flusher.pid,
                    _DRAIN_SECONDS_MAX,
                )
                return
            if bool(self._line.held) != bool(
                logged_held
            ):  # the text differs at each try: compare only whether there is one
                logged_held = self._line.held
                self._log_waiting(logged_held, left_seconds)
            port_fd = self._port.fileno() if self._trainers.present else None
            self._line.wait(min(left_seconds, _TICK_SECONDS), *(() if port_fd is None else (port_fd,)))
            if self._trainers.present:
                self._poll_once()
                continue
            self._flusher_handler.poll()
            self._flusher_handler.reattach()
            self._actions.process(Tick())
            reap()

    def _log_waiting(self, held: str, left_seconds: float) -> None:
        if held:
            _log.warning(
                "waiting for the store until %s: %s. The flusher's log: %s",
                time.strftime("%H:%M:%S", time.localtime(time.time() + left_seconds)),
                held,
                self._line.log_path,
            )

    def _drain_error(self) -> PeerLost:
        flusher, line = self._line.flusher, self._line
        return PeerLost(
            f"{line.failures} flushers in a row ended, or could not be started, before all was durable "
            f"({line.lost_reason or 'the last one has just been started'}); fix the error in {line.log_path}, "
            f"then start the job, or `holdfast flusher --store {flusher.store_url}`: it publishes what is in "
            f"{flusher.ring.directory}"
        )


class StartRefused(Exception):
    """The stager could not start, and the ranks were told; one of them prints the error."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.error = error


def serve(
    port: TrainersPort,
    config: StagerConfig | None,
    problem: HoldfastError | None = None,
    attached: Flusher | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
    lead_attempt: int = 0,
) -> set[int]:
    """Serve until the ranks have left or the stager is stopping, and every staged step is in the store.

    `problem`: why the stager cannot serve; `config` is missing if the settings are wrong. `attached`: the flusher, if
    this stager is attached already. `lead_attempt`: see `attach`. Returns the ranks that were lost or left alone.

    Raises:
        StartRefused: There is no flusher or no `config`, and the ranks were told.
        HoldfastError: The same, and no rank has asked; or staged checkpoints could not be written.
    """
    segments = None
    try:
        if problem is not None:
            raise problem
        assert config is not None
        segments = SegmentList(config.runtime_dir)
        flusher = attached or attach(config, lead_attempt=lead_attempt)
    except HoldfastError as error:
        was_sent = refuse_start(port, error, is_stopping)
        if segments is not None:
            segments.close()
        if was_sent:  # the lowest rank prints the error, once for the job
            _log.debug("the start was refused", exc_info=error)
            raise StartRefused(error) from None
        raise
    events = EventLog(config.events, role="stager")
    service = StagerService(config, port, flusher, events=events, is_stopping=is_stopping)
    with export_spans("stager", flusher.store_url, events):  # outermost: the exporter may take seconds to end
        try:
            state = StatusState("stager", flusher.store_url, ranks=service.rank_statuses)
            events.add_listener(state.handle_event)
            with (
                serve_metrics(config, events),
                serve_status(flusher.ring.directory, "stager", state.build_document),
            ):
                events.emit(
                    "stager_ready",
                    {
                        "attempt": flusher.attempt,
                        "ranks": port.ranks,
                        "flusher_pid": flusher.pid,
                        "transport": _transport(config),
                        **({"returned": True} if getattr(port, "generation", 0) else {}),
                    },
                )
                # Not earlier: the ranks wait for the start-up, and busy ranks would slow it down.
                yield_to_training(config.niceness)
                service.run()
                events.emit("stager_ended", {"lost_ranks": sorted(service.lost_ranks)})
        finally:
            service.close()
            events.close()
            segments.close()
    return service.lost_ranks


def _transport(config: StagerConfig) -> Transport:
    if config.listen is None:
        return "mpi"
    return "tcp" if config.tls_cert is None else "tls"


def refuse_start(
    port: TrainersPort, error: HoldfastError, is_stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Tell every trainer why the stager does not start, until each has left; return whether a trainer was told.

    A script may load its model for minutes before it makes its Checkpointer. There is no deadline therefore: only the
    ranks' leaving ends the wait, or `is_stopping`.
    """
    waiting = set(range(port.ranks))
    message = Welcome.refusal_frame(error)
    was_sent = False
    while waiting and not is_stopping():
        result = port.poll()
        for rank, raw in result.messages:
            try:
                kind = wire.decode(raw).kind
            except ProtocolError as broken:
                _log.warning("rank %d: %s", rank, broken)
                waiting.discard(rank)
                continue
            if kind is Kind.HELLO:
                port.send(rank, message)
                was_sent = True
            elif kind is Kind.BYE:
                waiting.discard(rank)
        waiting -= {rank for rank, _ in result.lost}
        time.sleep(_REFUSAL_PAUSE_SECONDS)
    return was_sent


def send_end(port: TrainersPort, error: HoldfastError) -> None:
    """Tell every rank that this stager ends by `error`; otherwise they would wait for their timeout."""
    end_error = ProtocolError(
        f"it has ended: {error}"
    )  # not PeerLost: the ranks would take that for another rank
    for rank in range(port.ranks):
        port.send(rank, wire.encode(Kind.REFUSED, body=wire.error_body(end_error)))
    deadline = time.monotonic() + _FINAL_SEND_SECONDS_MAX
    while port.unsent and time.monotonic() < deadline:
        port.poll()
        time.sleep(_REFUSAL_PAUSE_SECONDS)
