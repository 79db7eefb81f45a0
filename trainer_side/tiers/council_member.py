"""What one rank waits for rank 0 to say, and what the rank does with it. No messages and no threads of its own.

COMPLETE, VOID        ─► on_verdict
RESERVED, GO, REFUSED ─► the answer to `agree` or `concur`, for which the training thread waits
ROOM                  ─► room for rank 0's pickle
DOUBTED               ─► on_doubt
SAVE_AT               ─► appointments: a step that all ranks save
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.notices.messages import Announcement
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Frame, Kind, peer_error
from holdfast.wire.state_messages import Agreement
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.tiers.tally import Order, StepVerdict

_log = logging.getLogger("holdfast.trainer.council")


@dataclass(eq=False)
class PeerQuestion:
    """An open `agree` or `concur`. `answer`: None says that all ranks are ready."""

    answered: threading.Event = field(default_factory=threading.Event)
    answer: Agreement | HoldfastError | None = None


class CouncilMember:
    """One rank as a listener. `hear`, `check_silence` and `end` belong to the council's thread, the rest to any.

    Args:
        rank: This rank, for messages.
        on_verdict: Called with every verdict, in the council's thread.
        appointments: At which step this rank acts on a notice; only in a job without a stager.
        silence_seconds_max: How long a verdict on a sealed slice is waited for.

    Attributes:
        new_pickle_reserve_bytes: Room that rank 0's pickle was given after it had outgrown its reserve; 0 before.
        on_doubt: Called with each doubt of a rank about its copies, in the council's thread.
    """

    def __init__(
        self,
        rank: int,
        on_verdict: Callable[[StepVerdict], None],
        appointments: AgreedSteps | None,
        *,
        silence_seconds_max: float,
    ) -> None:
        self._rank, self._on_verdict, self._appointments = rank, on_verdict, appointments
        self._silence_seconds_max = silence_seconds_max
        self.new_pickle_reserve_bytes = 0
        self.on_doubt: Callable[[Doubt], None] = lambda _: None
        self._undecided: dict[tuple[int, Order], float] = {}  # slices that this rank has sealed, and when
        self._question: PeerQuestion | None = None

    @property
    def undecided(self) -> int:
        """How many slices that this rank has sealed have no verdict yet."""
        return len(self._undecided)

    @property
    def is_asking(self) -> bool:
        """Whether the training thread waits for an answer."""
        return self._question is not None

    def sealed(self, tier: int, order: Order, now: float) -> None:
        """Expect a verdict on a slice of this rank."""
        self._undecided[tier, order] = now

    def asks(self) -> PeerQuestion:
        """Expect an answer; this question replaces any that was open."""
        self._question = PeerQuestion()
        return self._question

    def hear(self, frame: Frame) -> bytes | None:
        """Take a message of rank 0; returns the reply, if there is one.

        Raises:
            ProtocolError: The message does not hold what it should, or rank 0 may not send it.
        """
        match frame.kind:
            case Kind.COMPLETE | Kind.VOID:
                verdict = StepVerdict.from_frame(frame)
                self._on_verdict(verdict)
                self._undecided.pop((verdict.tier, verdict.order), None)
            case Kind.RESERVED:
                self._answer(Agreement.from_frame(frame))
            case Kind.GO:
                self._answer(None)
            case Kind.REFUSED:
                body = wire.json_body(frame, code=str, message=str)
                if not self._answer(peer_error(body["code"], body["message"])):
                    # Other ranks asked; this one goes on.
                    _log.error("rank %d: other ranks cannot save: %s", self._rank, body["message"])
            case Kind.ROOM:
                self.new_pickle_reserve_bytes = max(self.new_pickle_reserve_bytes, frame.arg)
            case Kind.DOUBTED:
                self.on_doubt(Doubt.from_frame(frame))
            case Kind.SAVE_AT if self._appointments is not None:
                return self._hear_appointment(frame, self._appointments)
            case _:
                raise ProtocolError(f"rank {self._rank}: rank 0 sent {frame.kind.name}, which it must not")
        return None

    def check_silence(self, now: float) -> None:
        """See that rank 0 still decides.

        Raises:
            PeerLost: No verdict has come on a slice that was sealed long ago.
        """
        if not self._undecided:
            return
        waited = now - min(self._undecided.values())
        if waited > self._silence_seconds_max:
            raise PeerLost(
                f"rank {self._rank} has had no verdict from rank 0 on a slice that it sealed {waited:.0f} s ago"
            )

    def end(self, error: HoldfastError | None = None) -> None:
        """Nothing more comes from rank 0. With an error, that is the answer to an open question."""
        if error is not None:
            self._answer(error)
        if self._appointments is not None:
            self._appointments.end()

    def _answer(self, answer: Agreement | HoldfastError | None) -> bool:
        """Whether a question was open."""
        question, self._question = self._question, None
        if question is None:
            return False
        question.answer = answer
        question.answered.set()
        return True

    def _hear_appointment(self, frame: Frame, appointments: AgreedSteps) -> bytes | None:
        try:
            answer = appointments.heard(Announcement.from_frame(frame))
        except ProtocolError as error:
            _log.error("rank %d: leaves out a step to save after a notice: %s", self._rank, error)
            appointments.end()  # otherwise training would wait at a step that it has promised
            return None
        return None if answer is None else answer.to_frame(Kind.AT, attempt=frame.attempt)
