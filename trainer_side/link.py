"""The link to the stager: the one thread of a training rank that talks MPI after start-up.

    training thread      agree, announce, offer, decline, close ──► commands ─┐
    copy thread          SliceSource.ready_bytes() grows ─────────────────────┤
                                                                              ▼
    this thread          commands · control messages · send what is credited and copied · deadlines · rest

Rules:
1. A frame is sent only under a credit, and only when its bytes are copied; its CRC is computed just before.
2. Every credit is answered: by a payload and SENT, or by RETURN.
3. What goes wrong with the stager never stops the training: it becomes `problem`, said once and loudly, and every later
   offer is declined at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast import wire
from holdfast.config import TrainerConfig
from holdfast.crc import crc32
from holdfast.errors import ConfigError, HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.events import EventLog
from holdfast.layout import Layout
from holdfast.wire import Agreement, Frame, Kind, Proposal, Welcome, peer_error
from trainer_side.transfer import SliceSource, Transfer, TransferState

if TYPE_CHECKING:
    from trainer_side.mpi import MpiPeers

__all__ = ["Agreement", "Link", "Proposal", "SliceSource", "Transfer", "TransferState", "Welcome"]

_log = logging.getLogger("holdfast.trainer.link")

_FRAMES_IN_FLIGHT_MAX = 4
_VERDICTS_KEPT = 256
_PAUSE_SECONDS_MIN = 50e-6
_SENDING_PAUSE_SECONDS_MAX = 0.5e-3
_IDLE_PAUSE_SECONDS_MAX = 10e-3  # an offer wakes the thread at once; only the stager's news wait so long
_STREAMING_SECONDS = 0.02  # a scattered payload moves only while both sides poll
_LEAVE_SECONDS_MAX = 5.0
_EXIT_SECONDS_MAX = 10.0
_SLACK_SECONDS = 10.0  # for an answer that itself has a deadline at the stager
_STALL_SECONDS_MAX = 1.0  # of silence counted for one turn: a process that was stopped has not listened


class StagerPort(Protocol):
    """What the link needs of MPI (`trainer_side.mpi.Port`)."""

    def send(self, message: bytes) -> None: ...
    def send_payload(self, payload: memoryview, slot: int) -> int: ...
    def sent(self, handle: int) -> bool: ...
    def poll(self) -> list[bytes]: ...
    def leave(self, seconds_max: float) -> None: ...


@dataclass(frozen=True)
class _Plan:
    """The announced layout, as this rank sends it: chunk → (offset in the source, bytes)."""

    digest: str
    frames: dict[int, tuple[int, int]]


@dataclass(eq=False)
class _Active:
    """A transfer that still has to do with the source's memory, or waits for the stager's verdict."""

    transfer: Transfer
    source: SliceSource | None  # None once released: a staging buffer is not kept longer than it is read
    plan: _Plan
    unsent: set[int]
    credits: dict[int, int] = field(default_factory=dict)  # chunk → slot
    sending: set[int] = field(default_factory=set)  # handles of payloads that MPI still reads
    done_said: bool = False


@dataclass(eq=False)
class _Question:
    """An open `agree`."""

    answered: threading.Event = field(default_factory=threading.Event)
    answer: Agreement | HoldfastError | None = None


class Link:
    """See the module. Made by `join`; its methods belong to the training thread unless they say otherwise.

    Attributes:
        rank: This training rank. `ranks`: how many there are.
        welcome: What the stager said at start-up.
        peers: The other ranks, for restore.
        events: Event log; may be replaced before the first offer.
        problem: Why no checkpoint can be taken any more; None while all is well. Any thread.
        staged_step: Newest step that is staged; -1 before the first. `durable_step`: that is durable. Any thread.
        new_pickle_reserve_bytes: Room that rank 0's pickle was given after it had outgrown its reserve; 0 before.
    """

    def __init__(
        self,
        config: TrainerConfig,
        port: StagerPort,
        welcome: Welcome,
        *,
        rank: int,
        ranks: int,
        peers: MpiPeers | None = None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._port, self._clock = config, port, clock
        self.welcome, self.rank, self.ranks = welcome, rank, ranks
        self._peers = peers
        self.events = events or EventLog(None, role="trainer", rank=rank)
        self.problem: HoldfastError | None = None
        self.staged_step = self.durable_step = -1
        self.new_pickle_reserve_bytes = 0
        self._plan: _Plan | None = None
        self._newest_step = -1
        self._accepted: list[Transfer] = []  # by the training thread, for close()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._active: OrderedDict[int, _Active] = OrderedDict()
        self._verdicts: OrderedDict[int, Frame] = OrderedDict()  # on steps that this rank has not offered yet
        self._question: _Question | None = None
        self._leaving = False
        self._closed = False
        self._turned_at = self._active_at = clock()
        self._silent_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="holdfast-link", daemon=True)
        self._thread.start()

    @classmethod
    def join(cls, config: TrainerConfig, events: EventLog | None = None) -> Link:
        """Meet the other ranks and the stager. Collective; main thread; at most `start_seconds_max`.

        Raises:
            ConfigError: There is no stager in this job, or more than one.
            PeerLost: Somebody did not come, or did not answer.
            HoldfastError: The stager could not start; its error, of its class.
        """
        from trainer_side.mpi import World  # starts MPI: not when somebody only imports this package

        world = World.join(config.start_seconds_max)
        port = world.port()
        port.send(
            wire.encode(
                Kind.HELLO,
                body=wire.to_json({"version": wire.VERSION, "pid": os.getpid(), "host": platform.node()}),
            )
        )
        deadline = time.monotonic() + config.start_seconds_max
        try:
            welcome = _await_welcome(port, deadline, config.start_seconds_max)
            if welcome.ranks != world.ranks:
                raise ProtocolError(f"the stager sees {welcome.ranks} trainers, MPI {world.ranks}")
        except HoldfastError:
            port.leave(_LEAVE_SECONDS_MAX)
            raise
        link = cls(
            config, port, welcome, rank=world.rank, ranks=world.ranks, peers=world.peers(), events=events
        )
        # A script that ends without close() must not leave the stager waiting for this rank.
        atexit.register(link._at_exit)
        return link

    @property
    def peers(self) -> MpiPeers:
        """The other ranks; before the first step only."""
        if self._peers is None:
            raise ConfigError("this link was made without peers")
        return self._peers

    # -- what the training thread asks for -----------------------------------------------------------------------

    def agree(self, proposal: Proposal) -> Agreement:
        """Compare this rank's tensors with those of the others. Collective; waits for the slowest rank.

        Raises:
            StateError: The ranks hold different tensors: which rank, which tensor, expected, got.
            PeerLost: A rank or the stager did not answer in time.
        """
        if self.problem is not None:
            raise self.problem
        question = _Question()
        message = proposal.to_frame(self.welcome.attempt)

        def ask() -> None:
            self._question = question
            self._port.send(message)

        self._command(ask)
        seconds_max = max(self._config.start_seconds_max, self.welcome.offer_seconds_max + _SLACK_SECONDS)
        if not question.answered.wait(seconds_max):
            raise PeerLost(
                f"rank {self.rank} waited {seconds_max:g} s for the stager to compare the layouts of all ranks"
            )
        if not isinstance(question.answer, Agreement):
            assert question.answer is not None
            raise question.answer
        return question.answer

    def announce(self, layout: Layout) -> None:
        """Use `layout` for all later offers. Every rank calls it with the same one; rank 0 sends it to the stager."""
        frames: dict[int, tuple[int, int]] = {}
        offset = 0
        for chunk, extents in layout.sends(self.rank):
            nbytes = sum(extent.nbytes for extent in extents)
            frames[chunk] = (offset, nbytes)
            offset += nbytes
        self._plan = _Plan(layout.digest, frames)
        if self.rank == 0 and self.problem is None:
            message = wire.encode(Kind.LAYOUT, attempt=self.welcome.attempt, body=layout.to_bytes())
            self._command(lambda: self._port.send(message))

    def offer(self, step: int, source: SliceSource, record: dict[str, Any]) -> Transfer:
        """Offer the checkpoint of `step`; returns at once. `source` must stay as it is until the transfer is released.

        Args:
            step: Higher than every step before, else it is declined here.
            source: This rank's bytes.
            record: What is known so far, `saved_at_unix` among it; the link adds its times.

        Raises:
            StateError: No layout was announced.
        """
        plan = self._plan
        if plan is None:
            raise StateError(f"rank {self.rank}: step {step} is offered before a layout was announced")
        transfer = Transfer(step, record)
        refusal = str(self.problem) if self.problem is not None else ""
        if not refusal and step <= self._newest_step:
            # By the same rule on each rank, so that all leave it out.
            refusal = f"step {step} is not above step {self._newest_step}, which was saved or declined before"
        if refusal:
            transfer.reach(TransferState.DECLINED, refusal)
            transfer.released.set()
            return transfer
        self._newest_step = step
        self._accepted = [other for other in self._accepted if not other.ended.is_set()] + [transfer]
        self._command(lambda: self._begin(_Active(transfer, source, plan, set(plan.frames))))
        return transfer

    def decline(self, step: int, reason: str, *, needed_pickle_bytes: int = 0) -> None:
        """Tell the stager, and through it all ranks, that this rank takes no checkpoint of `step`. Any thread.

        Args:
            step: A new step, or one that was offered and cannot go on.
            reason: Why.
            needed_pickle_bytes: Above 0: the pickle has outgrown its reserve; rank 0 only.
        """
        self._newest_step = max(self._newest_step, step)
        message = wire.encode(
            Kind.DECLINE,
            attempt=self.welcome.attempt,
            step=step,
            arg=needed_pickle_bytes,
            body=reason.encode()[:2000],
        )

        def tell() -> None:
            active = self._active.get(step)
            if active is None and step in self._verdicts:
                return  # declined by somebody else already
            self._port.send(message)
            if active is not None:
                self._end(active, TransferState.DECLINED, f"rank {self.rank}: {reason}")

        if self.problem is None:
            self._command(tell)

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """Wait until what was offered is durable (or staged), say good-bye, end the thread. Safe to call twice.

        Args:
            wait_for: `DURABLE`, or `STAGED` to leave the rest to the flusher.
            seconds_max: How long to wait; what is not there then is logged, not lost.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        deadline = self._clock() + seconds_max
        for transfer in self._accepted:
            event = transfer.ended if wait_for is TransferState.DURABLE else transfer.settled
            if not event.wait(max(0.0, deadline - self._clock())) and self.problem is None:
                _log.error(
                    "rank %d: step %d is %s, not %s, after waiting %g s at close",
                    self.rank,
                    transfer.step,
                    transfer.state.value,
                    wait_for.value,
                    seconds_max,
                )

        def leave() -> None:
            self._leaving = True

        self._command(leave)
        self._thread.join(2 * _LEAVE_SECONDS_MAX)

    def _at_exit(self) -> None:
        self.close(wait_for=TransferState.STAGED, seconds_max=_EXIT_SECONDS_MAX)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_seconds = _PAUSE_SECONDS_MIN
        while not self._leaving:
            try:
                busy = self._turn()
            except HoldfastError as error:
                self._give_up(error)
                busy = True
            if busy:
                self._active_at = self._clock()
                pause_seconds = _PAUSE_SECONDS_MIN
                continue
            pause_seconds = self._rest(pause_seconds)
        for active in list(self._active.values()):
            self._end(
                active, TransferState.FAILED, "the link was closed before the stager had said how it ended"
            )
            active.transfer.released.set()
        self._port.leave(0.0 if self.problem else _LEAVE_SECONDS_MAX)

    def _turn(self) -> bool:
        """Look at everything once; whether anything had happened."""
        busy = False
        while self._commands:
            busy = True
            self._commands.popleft()()
        if self.problem is not None:
            return busy  # the stager is gone for good: MPI is not touched any more
        messages = self._port.poll()
        self._note_silence(bool(messages))
        for message in messages:
            self._hear(wire.decode(message))
        for active in list(self._active.values()):
            busy |= self._pump(active)
        return busy or bool(messages)

    def _rest(self, pause_seconds: float) -> float:
        """Give the core away, and say how long to pause next time."""
        sending = any(active.sending for active in self._active.values())
        if sending and self._clock() - self._active_at < _STREAMING_SECONDS:
            time.sleep(0)
            return pause_seconds
        under_way = any(not active.transfer.settled.is_set() for active in self._active.values())
        self._wake.wait(pause_seconds)
        self._wake.clear()
        return min(_SENDING_PAUSE_SECONDS_MAX if under_way else _IDLE_PAUSE_SECONDS_MAX, pause_seconds * 1.3)

    def _note_silence(self, heard: bool) -> None:
        now = self._clock()
        self._silent_seconds = (
            0.0 if heard else self._silent_seconds + min(_STALL_SECONDS_MAX, now - self._turned_at)
        )
        self._turned_at = now
        limit = max(self._config.stager_seconds_max, 2 * self.welcome.beat_seconds)
        if self._silent_seconds > limit:
            raise PeerLost(
                f"rank {self.rank} heard nothing from the stager for {limit:g} s; it is dead, stopped or cut off"
            )

    def _give_up(self, error: HoldfastError) -> None:
        if self.problem is not None:
            return
        self.problem = error
        _log.error(
            "rank %d: NO MORE CHECKPOINTS are taken in this job, training goes on: %s", self.rank, error
        )
        self.events.emit("stager_lost", {"code": error.code, "message": str(error)})
        for active in list(self._active.values()):
            active.sending.clear()  # whoever would read it is gone
            self._end(active, TransferState.FAILED, str(error))
        self._answer(error)

    def _answer(self, answer: Agreement | HoldfastError) -> bool:
        question, self._question = self._question, None
        if question is None:
            return False
        question.answer = answer
        question.answered.set()
        return True

    # -- messages ------------------------------------------------------------------------------------------------

    def _hear(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.BEAT:
                pass  # it was heard, which is all it says
            case Kind.CREDIT:
                self._hear_credit(frame)
            case Kind.DECLINED | Kind.STAGED | Kind.DURABLE | Kind.FAILED:
                self._hear_verdict(frame)
            case Kind.RESERVED:
                self._answer(Agreement.from_frame(frame))
            case Kind.REFUSED:
                body = wire.json_body(frame, code=str, message=str)
                error = peer_error(body["code"], body["message"])
                if not self._answer(error):
                    raise error
            case _:
                raise ProtocolError(f"rank {self.rank}: the stager sent {frame.kind.name}, which it must not")

    def _hear_credit(self, frame: Frame) -> None:
        active = self._active.get(frame.step)
        if active is None or active.transfer.state.final or frame.chunk not in active.unsent:
            self._return(frame.step, frame.chunk)
            return
        active.credits[frame.chunk] = frame.arg
        if active.transfer.state is TransferState.OFFERED:
            active.transfer.reach(TransferState.SENDING)

    def _return(self, step: int, chunk: int) -> None:
        self._port.send(wire.encode(Kind.RETURN, attempt=self.welcome.attempt, step=step, chunk=chunk))

    def _hear_verdict(self, frame: Frame) -> None:
        body = wire.json_body(frame)
        reserve_bytes = body.get("new_pickle_reserve_bytes")
        if type(reserve_bytes) is int:
            self.new_pickle_reserve_bytes = max(self.new_pickle_reserve_bytes, reserve_bytes)
        active = self._active.get(frame.step)
        if active is None:
            self._verdicts[frame.step] = frame
            while len(self._verdicts) > _VERDICTS_KEPT:
                self._verdicts.popitem(last=False)
            return
        self._judge(active, frame.kind, body)

    def _judge(self, active: _Active, kind: Kind, body: dict[str, Any]) -> None:
        step = active.transfer.step
        match kind:
            case Kind.STAGED:
                self.staged_step = max(self.staged_step, step)
                active.transfer.reach(TransferState.STAGED)
                self.events.emit("staged", active.transfer.summary(), step=step)
            case Kind.DURABLE:
                self.durable_step = max(self.durable_step, step)
                active.transfer.reach(TransferState.DURABLE)
                self.events.emit("durable", active.transfer.summary(), step=step)
                self._forget_if_over(active)
            case Kind.DECLINED:
                self._end(active, TransferState.DECLINED, str(body.get("reason", "")))
            case _:
                self._end(active, TransferState.FAILED, str(body.get("message", "")))

    # -- sending -------------------------------------------------------------------------------------------------

    def _begin(self, active: _Active) -> None:
        transfer = active.transfer
        if self.problem is not None:
            transfer.reach(TransferState.DECLINED, str(self.problem))
            self._release(active)
            return
        self._active[transfer.step] = active
        verdict = self._verdicts.get(transfer.step)
        if verdict is not None:
            self._judge(active, verdict.kind, wire.json_body(verdict))
            return
        body = {**transfer.summary(), "layout_digest": active.plan.digest}
        self._port.send(
            wire.encode(Kind.OFFER, attempt=self.welcome.attempt, step=transfer.step, body=wire.to_json(body))
        )

    def _pump(self, active: _Active) -> bool:
        """Send what is credited and ready; note what has left. Whether anything moved."""
        moved = False
        for handle in [handle for handle in active.sending if self._port.sent(handle)]:
            active.sending.discard(handle)
            moved = True
        transfer = active.transfer
        if not transfer.state.final:
            ready_bytes = active.source.ready_bytes() if active.source and active.credits else 0
            for chunk in sorted(active.credits):
                offset, nbytes = active.plan.frames[chunk]
                if offset + nbytes > ready_bytes or len(active.sending) >= _FRAMES_IN_FLIGHT_MAX:
                    break
                self._send(active, chunk, active.credits.pop(chunk))
                moved = True
            if not active.unsent and not active.done_said:
                active.done_said = moved = True
                self._port.send(
                    wire.encode(
                        Kind.DONE,
                        attempt=self.welcome.attempt,
                        step=transfer.step,
                        body=wire.to_json(transfer.summary()),
                    )
                )
        over = not active.sending and (active.done_said or transfer.state.final)
        if over and not transfer.released.is_set():
            moved = True
            if transfer.state in {TransferState.OFFERED, TransferState.SENDING}:
                transfer.reach(TransferState.SENT)
            self._release(active)
            self._forget_if_over(active)
        return moved

    def _send(self, active: _Active, chunk: int, slot: int) -> None:
        offset, nbytes = active.plan.frames[chunk]
        assert active.source is not None
        payload = active.source.view(offset, nbytes)
        begun = time.perf_counter()
        crc = crc32(payload)
        record = active.transfer.record
        record["crc_seconds"] = record.get("crc_seconds", 0.0) + time.perf_counter() - begun
        record["sent_bytes"] = record.get("sent_bytes", 0) + nbytes
        active.sending.add(self._port.send_payload(payload, slot))
        active.unsent.discard(chunk)
        self._port.send(
            wire.encode(
                Kind.SENT,
                attempt=self.welcome.attempt,
                step=active.transfer.step,
                chunk=chunk,
                arg=nbytes,
                flags=crc,
            )
        )

    def _end(self, active: _Active, state: TransferState, reason: str) -> None:
        """Give a transfer up; credits go back, payloads under way come to their end."""
        if active.transfer.state.final:
            return
        active.transfer.reach(state, reason)
        if self.problem is None:
            for chunk in active.credits:
                self._return(active.transfer.step, chunk)
        active.credits.clear()
        if not active.sending:
            self._release(active)
        self.events.emit(
            state.value, {**active.transfer.summary(), "reason": reason}, step=active.transfer.step
        )
        self._forget_if_over(active)

    def _release(self, active: _Active) -> None:
        active.source = None
        active.transfer.released.set()

    def _forget_if_over(self, active: _Active) -> None:
        if active.transfer.state.final and active.transfer.released.is_set():
            self._active.pop(active.transfer.step, None)


def _await_welcome(port: StagerPort, deadline: float, seconds_max: float) -> Welcome:
    while time.monotonic() < deadline:
        for message in port.poll():
            frame = wire.decode(message)
            if frame.kind is Kind.WELCOME:
                return Welcome.from_frame(frame)
            if frame.kind is not Kind.BEAT:
                raise ProtocolError(f"the stager said {frame.kind.name} before WELCOME")
        time.sleep(_PAUSE_SECONDS_MIN * 20)
    raise PeerLost(f"the stager did not answer within {seconds_max:g} s; look at its messages")
