"""Passes events to the session and executes its actions: journal writes, messages to flusher and ranks, log events.

    FillSlot, ChunkFull, FreeSlot ──► ring's journal      SendMessage ─────────────► ranks, event log
    Begin, Staged ──► layout, checkpoint file ──► flusher     GrantCredit, CancelReceive ──► payloads, ranks

Each action writes the journal first and sends messages second, so a kill at any instruction leaves a readable state.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from holdfast.errors import HoldfastError, ProtocolError
from holdfast.faultpoint import Point, reach
from holdfast.image.save_record import StepRecord
from holdfast.image.shares import WHOLE
from holdfast.notices.should_save import InFlight
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from stager.flusher_line import FlusherConnection
from stager.notices import Notices
from stager.payloads import Payloads
from stager.session.session import Session
from stager.session.session_messages import (
    Abort,
    Action,
    BeginReceiving,
    CancelReceive,
    Diverged,
    Event,
    Failed,
    FillSlot,
    FreeSlot,
    GrantCredit,
    MarkFull,
    MarkStaged,
    SendMessage,
)
from stager.trainers import Trainers

_log = logging.getLogger("holdfast.stager")


class Actions:
    """Executes the session's actions. Only for the loop's thread."""

    def __init__(
        self,
        session: Session,
        line: FlusherConnection,
        trainers: Trainers,
        payloads: Payloads,
        notices: Notices,
        events: EventLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._clock = session, clock
        self.line, self.trainers, self.payloads = line, trainers, payloads
        self.notices, self.events = notices, events
        self._offered_at: dict[int, float] = {}  # step → when the first rank offered it, and when all had
        self._begun_at: dict[int, float] = {}
        # step → bytes of the image, and when it was offered: this stager's share is staged, others may not be
        self._partly_staged: dict[int, tuple[int, float]] = {}
        self._last_logged = ""  # the last reason that was logged, with its digits masked

    def on_offered(self, step: int) -> None:
        self._offered_at.setdefault(step, self._clock())

    def on_all_staged(self, step: int) -> None:
        """Note that every stager has staged its share of `step`."""
        staged = self._partly_staged.get(step)
        self._forget_partly_staged(step)
        if staged is not None:
            nbytes, offered_at = staged
            self.notices.on_staged(step, nbytes, self._clock() - offered_at)

    def partly_staged(self, now: float) -> list[InFlight]:
        """Return the steps of which this stager's share is staged and another one may not be, oldest first."""
        return [InFlight(step, 1.0, now - at) for step, (_, at) in sorted(self._partly_staged.items())]

    def _forget_partly_staged(self, step: int) -> None:
        """Forget this step and older ones."""
        self._partly_staged = {one: at for one, at in self._partly_staged.items() if one > step}

    def process(self, event: Event, on_protocol_error: Callable[[ProtocolError], None] | None = None) -> None:
        """Pass an event to the session and execute its actions. `on_protocol_error`: called when the sender has broken
        the protocol.

        Raises:
            ProtocolError: The sender broke the protocol, and there is no `on_protocol_error`.
            HoldfastError, OSError: Writing to the ring failed.
        """
        try:
            actions = self._session.handle(event, self._clock())
        except ProtocolError as error:
            if on_protocol_error is None:
                raise
            on_protocol_error(error)
            return
        self.execute(actions)

    def execute(self, actions: list[Action]) -> None:
        """Execute these actions in order. Raises as `process`."""
        for action in actions:
            try:
                self._execute_one(action)
            except (HoldfastError, OSError) as error:
                if not isinstance(action, BeginReceiving | MarkStaged):
                    raise  # the journal no longer matches the session, so the stager must end
                _log.error("step %d: %s", action.step, error)
                code = error.code if isinstance(error, HoldfastError) else ProtocolError.code
                self.process(Failed(action.step, code, f"stager: {error}"))

    def _execute_one(self, action: Action) -> None:
        ring, line, attempt = self.line.flusher.ring, self.line, self.line.flusher.attempt
        match action:
            case GrantCredit(rank, step, chunk, slot, layout):
                self.payloads.post(rank, slot, step, chunk, layout)
                self.trainers.send(
                    rank, wire.encode(Kind.CREDIT, attempt=attempt, step=step, chunk=chunk, arg=slot)
                )
            case FillSlot(slot, step, chunk):
                ring.mark_filling(slot, attempt, step, chunk)
            case MarkFull(slot, _, _, sources, nbytes):
                reach(Point.CHUNK_RECEIVED)
                ring.mark_full(slot, sources, nbytes)
                reach(Point.CHUNK_FULL)
                line.send("chunk", slot=slot)
            case FreeSlot(slot):
                ring.free(slot)
            case CancelReceive(rank, slot):
                self.payloads.cancel(rank, slot)
            case SendMessage():
                self._send_message(action)
            case BeginReceiving(step, layout):
                self._begun_at[step] = self._clock()
                ring.put_layout(layout)
                ring.write_checkpoint(attempt, step, "receiving", layout.digest, {})
                line.send("begin", attempt=attempt, step=step, layout_digest=layout.digest)
            case Diverged(step, message, body):
                _log.error("%s", message)
                self.events.emit("divergence", dict(body), step=step)
            case MarkStaged():
                self._mark_staged(action)
            case Abort(step, reason):
                line.send("abort", attempt=attempt, step=step, reason=reason[:2000])

    def _send_message(self, action: SendMessage) -> None:
        if action.kind is Kind.DURABLE:
            self.on_all_staged(action.step)  # rank 0 may have died before it said so
        if action.kind in {Kind.FAILED, Kind.DECLINED} and action.rank is None:
            self._partly_staged.pop(action.step, None)
            reason = action.body.get("message") or action.body.get("reason")
            now = self._clock()
            seconds = now - self._offered_at.pop(action.step, now)
            self._begun_at.pop(action.step, None)
            # A slow store declines every step for the same reason: log it once. The events still count the steps.
            if self.line.held:
                reason = f"{reason}; the store takes nothing: {self.line.held}"
            masked = re.sub(r"[0-9]+", "#", str(reason))
            if masked != self._last_logged:
                _log.warning("step %d is %s: %s", action.step, action.kind.name.lower(), reason)
                self._last_logged = masked
            fields = {**action.body, "seconds": round(seconds, 6)}
            self.events.emit(action.kind.name.lower(), fields, step=action.step)
        message = wire.encode(
            action.kind, attempt=self.line.flusher.attempt, step=action.step, body=wire.to_json(action.body)
        )
        if action.rank is None:
            self.trainers.send_all(message)
            if action.kind in {Kind.FAILED, Kind.DECLINED}:
                body = action.body
                self.notices.on_ended(action.step, str(body.get("message") or body.get("reason")))
        else:
            self.trainers.send(action.rank, message)

    def _mark_staged(self, action: MarkStaged) -> None:
        ring, attempt = self.line.flusher.ring, self.line.flusher.attempt
        staged_at_unix = time.time()
        record = StepRecord(dict(action.records), staged_at_unix, drift=action.drift)
        saved_at_unix = record.saved_at_unix
        pgt1_seconds = 0.0 if saved_at_unix is None else max(0.0, staged_at_unix - saved_at_unix)
        now = self._clock()
        begun_at = self._begun_at.get(action.step, now)
        offered_at = self._offered_at.get(action.step, begun_at)
        record.pgt1_seconds, record.offers_seconds = pgt1_seconds, begun_at - offered_at
        record.receive_seconds = now - begun_at
        for times in (self._offered_at, self._begun_at):
            for step in [step for step in times if step <= action.step]:
                del times[step]
        reach(Point.SEALED)
        ring.write_checkpoint(attempt, action.step, "staged", action.layout.digest, record.to_json())
        reach(Point.STAGED)
        self.line.send("staged", attempt=attempt, step=action.step)
        fields: dict[str, object] = {"pgt1_seconds": pgt1_seconds, "image_bytes": action.layout.image_bytes}
        share = self.line.share_of(action.layout).number
        if share != WHOLE:
            fields["share"] = str(share)
        self.events.emit("staged", fields, step=action.step)
        self._send_message(SendMessage(None, Kind.STAGED, action.step, {"pgt1_seconds": pgt1_seconds}))
        if share == WHOLE:
            self.notices.on_staged(action.step, action.layout.image_bytes, now - offered_at)
        else:
            self._partly_staged[action.step] = action.layout.image_bytes, offered_at
