"""The thread that carries the messages of the ranks' council: one per rank; on rank 0 it also decides.

    this rank says ─► outbox ═ MPI ═► rank 0: Coordinator ═ MPI ═► every rank: CouncilMember

No collective operation, no wait without a deadline, no spinning: a thread with nothing to do looks every 10 ms.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind, decode
from trainer_side.background_thread import BackgroundThread, thread_died
from trainer_side.ranks.ports import CouncilPort
from trainer_side.tiers.coordinator import ROOT, Coordinator
from trainer_side.tiers.council_member import CouncilMember

_log = logging.getLogger("holdfast.trainer.council")

_PAUSE_SECONDS = 10e-3
_AWAITING_PAUSE_SECONDS = 1e-3
_FLUSH_SECONDS_MAX = 10.0
_TASK = "agrees with the other ranks on what local tiers hold"


class CouncilThread:
    """See the module. `say` and `close` belong to any thread.

    Args:
        port: To the other ranks.
        member: Hears what rank 0 says.
        coordinator: Decides, on rank 0; None on the other ranks.
        on_turn: Called in this thread again and again, also when nothing is decided any more.
        clock: Seconds that only go forward.

    Attributes:
        problem: Why nothing is decided any more; None while all is well.
    """

    def __init__(
        self,
        port: CouncilPort,
        member: CouncilMember,
        coordinator: Coordinator | None,
        *,
        on_turn: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._member, self._coordinator = port, member, coordinator
        self._on_turn, self._clock = on_turn, clock
        self.problem: HoldfastError | None = None
        self._outbox: deque[bytes] = deque()
        self._wake = threading.Event()
        self._lost: frozenset[int] = frozenset()
        self._said_bye = False
        self._leaving: float | None = None
        self._thread = BackgroundThread(
            "holdfast-council", self._run, rank=port.rank, task=_TASK, died=self._give_up
        )
        self._thread.start()

    def say(self, message: bytes) -> None:
        """Say this to rank 0."""
        self._outbox.append(message)
        self._wake.set()

    def close(self, seconds_max: float) -> None:
        """Wait for the open verdicts and for the other ranks, then end. Safe to call twice."""
        if self._leaving is None:
            self._leaving = self._clock() + seconds_max
        self._wake.set()
        self._thread.join(seconds_max + _FLUSH_SECONDS_MAX)

    def _run(self) -> None:
        while not self._may_leave():
            try:
                self._on_turn()
                busy = self._turn()
            except HoldfastError as error:
                self._give_up(error)
                busy = False
            except Exception as error:  # noqa: BLE001 - a bug: the tiers' threads go on
                self._give_up(thread_died(error, rank=self._port.rank, name=self._thread.name, task=_TASK))
                busy = False
            if not busy:
                awaiting = self._member.is_asking or self._leaving is not None
                self._wake.wait(_AWAITING_PAUSE_SECONDS if awaiting else _PAUSE_SECONDS)
                self._wake.clear()
        self._member.end()
        if self.problem is None:
            self._port.flush(_FLUSH_SECONDS_MAX)

    def _turn(self) -> bool:
        if self.problem is not None:
            self._outbox.clear()
            return False
        busy = False
        while self._outbox:
            busy = True
            self._send(self._outbox.popleft())
        for rank, message in self._port.poll():
            busy = True
            self._hear(rank, message)
        self._look_at_the_dead()
        if self._coordinator is not None:
            self._tell_all(self._coordinator.tick(self._clock()))
        else:
            self._member.check_silence(self._clock())
        return busy

    def _send(self, message: bytes) -> None:
        if self._coordinator is not None:
            self._hear(ROOT, message)
        else:
            self._port.send(ROOT, message)

    def _hear(self, rank: int, message: bytes) -> None:
        try:
            frame = decode(message)
        except ProtocolError as error:
            raise ProtocolError(f"rank {rank}: {error}") from error
        if self._coordinator is not None:
            self._tell_all(self._coordinator.hear(rank, frame, self._clock()))
        elif rank == ROOT:
            self._hear_root(frame)
        else:
            raise ProtocolError(
                f"rank {rank} sent {frame.kind.name} to rank {self._port.rank}; only rank 0 may send to other ranks"
            )

    def _tell_all(self, messages: list[bytes]) -> None:
        for message in messages:
            for rank in range(self._port.ranks):
                if rank != ROOT and rank not in self._lost:
                    self._port.send(rank, message)
            self._hear_root(decode(message))

    def _hear_root(self, frame: Frame) -> None:
        reply = self._member.hear(frame)
        if reply is not None:
            self.say(reply)

    def _look_at_the_dead(self) -> None:
        lost = self._port.lost()
        if lost == self._lost:
            return
        new, self._lost = lost - self._lost, lost
        if self._coordinator is not None:
            for rank in sorted(new):
                self._tell_all(self._coordinator.died(rank))
        elif ROOT in new and self._leaving is None:
            raise PeerLost("rank 0 of the training ranks is dead")

    def _give_up(self, error: HoldfastError) -> None:
        if self.problem is not None:
            return
        _log.error(
            "rank %d: local tiers take nothing new in this job; every step that is complete in them stays: %s",
            self._port.rank,
            error,
        )
        self.problem = error  # only now: whoever sees the problem finds the log line as well
        self._member.end(error)

    def _may_leave(self) -> bool:
        """Whether nobody waits for this rank any more, and this rank waits for nobody."""
        if self._leaving is None:
            return False
        if self.problem is not None or self._clock() > self._leaving:
            return True
        if not self._said_bye:
            self._said_bye = True
            self.say(wire.encode(Kind.BYE))  # after all that was sealed
        if self._outbox or self._member.undecided:
            return False
        return self._coordinator is None or self._coordinator.all_left
