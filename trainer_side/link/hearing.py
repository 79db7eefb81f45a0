"""What a rank does with each message of its stager."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.errors import PeerLost, ProtocolError
from holdfast.notices.messages import Announcement, StepAnswer
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Frame, Kind, peer_error
from holdfast.wire.state_messages import Agreement
from trainer_side.link.schedule import Schedule
from trainer_side.link.stager_session import StagerSession
from trainer_side.notice.appointments import Appointments

_log = logging.getLogger("holdfast.trainer.link")


class Hearing:
    """See the module. For the link's thread.

    Args:
        rank: This training rank.
        appointments, schedule: Asked at which steps this rank saves.
        on_doubt: Told the doubts of ranks.
    """

    def __init__(
        self,
        rank: int,
        appointments: Appointments,
        schedule: Schedule,
        on_doubt: Callable[[Doubt], None],
    ) -> None:
        self._rank, self._on_doubt = rank, on_doubt
        self._appointments, self._schedule = appointments, schedule

    def hear(self, session: StagerSession, frame: Frame) -> None:
        """Act on one message.

        Raises:
            ProtocolError: The stager may not send this.
            HoldfastError: The stager drops this rank, and says why.
        """
        match frame.kind:
            case Kind.BEAT:
                # It was heard, which is all that it says; and so that the stager knows the same of this rank:
                session.port.send(wire.encode(Kind.BEAT, attempt=session.welcome.attempt))
            case Kind.CREDIT:
                session.outbox.credited(frame)
            case Kind.DECLINED | Kind.STAGED | Kind.DURABLE | Kind.FAILED:
                session.outbox.judged(frame)
            case Kind.SAVE_AT:
                answer = self._appointments.heard(Announcement.from_frame(frame))
                self._reply(session, frame, Kind.AT, answer)
            case Kind.SAVE_EVERY:
                seconds = self._appointments.step_seconds
                answer = self._schedule.heard(Announcement.from_frame(frame), seconds)
                self._reply(session, frame, Kind.HERE, answer)
            case Kind.DOUBTED:
                self._on_doubt(Doubt.from_frame(frame))
            case Kind.FETCHED:
                session.questions.fetched(frame)
            case Kind.RESERVED:
                session.questions.agreed(Agreement.from_frame(frame))
            case Kind.REFUSED:
                body = wire.json_body(frame, code=str, message=str)
                error = peer_error(body["code"], body["message"])
                if session.questions.agreed(error):
                    return
                if not isinstance(error, PeerLost):
                    raise error
                # Other ranks asked, and this one was missing: its link is as good as before.
                _log.error("rank %d has not come to a save of the other ranks: %s", self._rank, error)
            case _:
                raise ProtocolError(
                    f"rank {self._rank}: the stager sent {frame.kind.name}, which only ranks may send; "
                    "install the same holdfast on all machines"
                )

    def _reply(self, session: StagerSession, frame: Frame, kind: Kind, answer: StepAnswer | None) -> None:
        if answer is not None:
            session.port.send(answer.to_frame(kind, attempt=frame.attempt))
