"""All checkpoints of this rank in flight to the stager: offered, credited, sent, and judged.

    offer ─► OFFER ── CREDIT ─► pump: payloads ── STAGED, DURABLE ─► forgotten, once its memory is released
               │         └─ for a step that has ended: RETURN
               └── DECLINED, FAILED, the stager is lost, the link is closed ─► ended: credits are returned

Each is an `Outgoing`. A verdict that arrives before the offer of its step is kept, and applied to the offer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from holdfast.errors import HoldfastError, PeerLost
from holdfast.image.layout import Layout
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from trainer_side.link.job_state import JobState
from trainer_side.link.outgoing import Outgoing
from trainer_side.ranks.ports import StagerPort
from trainer_side.transfer import Transfer, TransferState

_VERDICTS_MAX = 256
_STALL_SECONDS_MAX = 1.0  # of silence counted per turn, since a stopped process does not listen


class StagerSilence:
    """How long the stager has been silent, counting only time in which this process has listened."""

    def __init__(self, rank: int, seconds_max: float, clock: Callable[[], float]) -> None:
        self._rank, self._seconds_max, self._clock = rank, seconds_max, clock
        self.checked_at = clock()
        self.seconds = 0.0

    def update(self, has_received: bool) -> None:
        """Note once per turn whether a message has come. PeerLost: the limit is reached."""
        now = self._clock()
        self.seconds = 0.0 if has_received else self.seconds + min(_STALL_SECONDS_MAX, now - self.checked_at)
        self.checked_at = now
        if self.seconds > self._seconds_max:
            raise PeerLost(
                f"rank {self._rank} heard nothing from the stager for {self._seconds_max:g} s; the stager is dead, "
                "stopped or cut off: look at its log and its machine"
            )


class Outbox:
    """The checkpoints in flight to one stager. Link's thread, except `verdict`."""

    def __init__(self, port: StagerPort, job: JobState, events: EventLog) -> None:
        self._port, self._job, self._events = port, job, events
        self._attempt = job.attempt
        self._layout: Layout | None = None  # the stager has it; rank 0 sends it
        self._active: OrderedDict[int, Outgoing] = OrderedDict()
        self._lost = False  # the stager is lost: nothing is sent any more
        self._verdicts: OrderedDict[int, Frame] = OrderedDict()  # newest ones, on steps not offered here

    # -- state ---------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Whether a checkpoint is in flight, or waits for its verdict."""
        return bool(self._active)

    def verdict(self, step: int) -> Frame | None:
        """Return the stager's verdict on a step that was not offered, if there is one. Any thread."""
        return self._verdicts.get(step)

    @property
    def all_staged(self) -> bool:
        """Whether every checkpoint is staged, and waits at most for DURABLE."""
        return all(active.transfer.settled.is_set() for active in self._active.values())

    @property
    def is_streaming(self) -> bool:
        """Whether a payload is in flight that moves only while the transport is polled."""
        return any(active.is_streaming(self._port) for active in self._active.values())

    def check_stall(self, now: float) -> bool:
        """Check whether payloads move only while the transport is polled; True when this is new."""
        # A list, because each one must check.
        stalled = [active.check_stall(now) for active in self._active.values()]
        return any(stalled)

    # -- actions of this rank ------------------------------------------------------------------------------------

    def offer(self, active: Outgoing) -> None:
        """Offer a checkpoint, unless the verdict on its step is known already."""
        step = active.transfer.step
        self._active[step] = active
        verdict = self.verdict(step)
        if verdict is not None:
            self._apply_verdict(active, verdict.kind, wire.json_body(verdict))
            return
        layout = active.plan.layout
        if self._job.rank == 0 and layout is not self._layout:
            self._port.send(wire.encode(Kind.LAYOUT, attempt=self._attempt, body=layout.to_bytes()))
            self._layout = layout
        active.offer(self._port, self._attempt)

    def decline(self, step: int, message: bytes, reason: Reason) -> None:
        """Send `message`, which declines `step`, unless the step has ended; give up its checkpoint, if offered."""
        active = self._active.get(step)
        if active is None and self.verdict(step) is not None:
            return  # another rank has declined it
        if active is not None and active.transfer.state.is_final:
            return
        self._port.send(message)
        if active is not None:
            self._end(active, TransferState.DECLINED, reason)

    def pump(self) -> bool:
        """Send frames that are credited and copied; return whether anything moved."""
        moved = False
        for active in list(self._active.values()):
            moved |= active.pump(self._port, self._attempt)
            self._remove_if_finished(active)
        return moved

    def fail_or_hold(self, error: HoldfastError, *, will_rejoin: bool = False) -> list[Outgoing]:
        """Fail or hold all transfers, since the stager is lost, and read no more of their memory.

        Returns those that are held for the stager's next process; none unless `will_rejoin`.
        """
        self._lost = True
        held = []
        for active in list(self._active.values()):
            active.drop_in_flight()
            if will_rejoin and active.transfer.hold():
                held.append(active)
            elif active.transfer.is_reported_elsewhere:
                del self._active[active.transfer.step]
            else:
                self._end(active, TransferState.FAILED, Reason.from_error(error))
            active.release()
            self._remove_if_finished(active)
        return held

    def close(self) -> None:
        """Fail the transfers whose outcome is still unknown when the link is closed."""
        unknown = DeclineCause.UNKNOWN.because("the link was closed before the stager had said how it ended")
        for active in list(self._active.values()):
            if active.transfer.state is not TransferState.STAGED:  # the flusher finishes a staged one
                self._end(active, TransferState.FAILED, unknown)
            active.release()

    # -- messages of the stager ----------------------------------------------------------------------------------

    def handle_credit(self, frame: Frame) -> None:
        """Take a CREDIT: a slot is free for a chunk of this rank."""
        active = self._active.get(frame.step)
        if active is None or not active.accept_credit(frame.chunk, frame.arg):
            self._return_credit(frame.step, frame.chunk)

    def handle_verdict(self, frame: Frame) -> None:
        """Take a verdict: STAGED, DURABLE, DECLINED or FAILED."""
        body = wire.json_body(frame)
        reserve_bytes = body.get("new_pickle_reserve_bytes")
        if type(reserve_bytes) is int:
            self._job.grow_pickle_reserve(reserve_bytes)
        active = self._active.get(frame.step)
        if active is None:
            self._verdicts[frame.step] = frame
            while len(self._verdicts) > _VERDICTS_MAX:
                self._verdicts.popitem(last=False)
            return
        self._apply_verdict(active, frame.kind, body)

    def _apply_verdict(self, active: Outgoing, kind: Kind, body: dict[str, Any]) -> None:
        step = active.transfer.step
        match kind:
            case Kind.STAGED:
                self._job.staged_step = max(self._job.staged_step, step)
                active.mark_staged()
                active.transfer.set_state(TransferState.STAGED)
                self._emit(active.transfer, {})
            case Kind.DURABLE:
                self._job.durable_step = max(self._job.durable_step, step)
                active.transfer.set_state(TransferState.DURABLE)
                self._emit(active.transfer, {})
                self._remove_if_finished(active)
            case Kind.DECLINED:
                self._end(active, TransferState.DECLINED, Reason.from_body(body))
            case _:
                self._end(active, TransferState.FAILED, Reason.from_body(body))

    def _end(self, active: Outgoing, state: TransferState, reason: Reason) -> None:
        """Give a transfer up and return its credits; payloads in flight are completed."""
        transfer = active.transfer
        if transfer.state.is_final:
            return
        transfer.set_state(state, reason)
        unused = active.pop_unused_credits()
        if not self._lost:
            for chunk in unused:
                self._return_credit(transfer.step, chunk)
        if not active.is_sending:
            active.release()
        self._emit(transfer, {"reason": reason.text, "cause": reason.cause})
        self._remove_if_finished(active)

    def _emit(self, transfer: Transfer, why: dict[str, str]) -> None:
        if not transfer.is_share:
            facts = {**transfer.record.to_json(), **why}
            self._events.emit(transfer.state.value, facts, step=transfer.step)

    def _return_credit(self, step: int, chunk: int) -> None:
        self._port.send(wire.encode(Kind.RETURN, attempt=self._attempt, step=step, chunk=chunk))

    def _remove_if_finished(self, active: Outgoing) -> None:
        if active.is_finished:
            self._active.pop(active.transfer.step, None)
