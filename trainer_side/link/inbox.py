"""Acts on each message of the stager.

CREDIT, STAGED, DURABLE, DECLINED, FAILED ─► outbox       SAVE_AT ────► agreed steps ──► AT
RESERVED, REFUSED, FETCHED ────────────────► requests     SAVE_EVERY ─► schedule ──────► HERE
BEAT ──► BEAT                                             DOUBTED ────► `on_doubt`
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.config import TrainerConfig
from holdfast.errors import PeerLost, ProtocolError
from holdfast.notices.messages import Announcement, StepAnswer
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Frame, Kind, peer_error
from holdfast.wire.state_messages import Agreement
from trainer_side.link.greeting import GreetedStager
from trainer_side.link.job_state import JobState
from trainer_side.link.open_requests import OpenRequests
from trainer_side.link.outbox import Outbox, StagerSilence
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.pace.schedule import Schedule

_log = logging.getLogger("holdfast.trainer.link")


class StagerSession:
    """The parts of the link that belong to one stager, from its WELCOME until that stager is lost.

    Link's thread, unless a part says otherwise. `enqueue`: Runs a function in that thread.
    """

    def __init__(
        self,
        config: TrainerConfig,
        greeted: GreetedStager,
        job: JobState,
        events: EventLog,
        *,
        enqueue: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self.port, self.welcome = port, welcome = greeted.port, greeted.welcome
        self.outbox = Outbox(port, job, events)
        self.requests = OpenRequests(config, port, welcome, rank=job.rank, enqueue=enqueue)
        self.silence = StagerSilence(
            job.rank, max(config.stager_seconds_max, 2 * welcome.beat_seconds), clock
        )


class ShareInbox:
    """Messages that a stager other than the lead may send. Agreements go through the lead alone. Link's thread.

    `last_step`: The last step that training has done; -1: none.
    """

    def __init__(self, rank: int, last_step: Callable[[], int]) -> None:
        self._rank, self._last_step = rank, last_step

    @property
    def last_step(self) -> int:
        """The last step that training has done; -1: none. Any thread."""
        return self._last_step()

    def handle(self, session: StagerSession, frame: Frame) -> None:
        """Act on one message. ProtocolError: the stager may not send it. Other errors: the stager drops this rank."""
        match frame.kind:
            case Kind.BEAT:
                # Answer, so that the stager knows that this rank is alive.
                session.port.send(wire.encode(Kind.BEAT, attempt=session.welcome.attempt))
            case Kind.CREDIT:
                session.outbox.handle_credit(frame)
            case Kind.DECLINED | Kind.STAGED | Kind.DURABLE | Kind.FAILED:
                session.outbox.handle_verdict(frame)
            case Kind.FETCHED:
                session.requests.resolve_fetch(frame)
            case Kind.REFUSED:
                self._handle_refused(session, frame)
            case _:
                raise ProtocolError(
                    f"rank {self._rank}: the stager sent {frame.kind.name}, which only ranks may send, or the first of "
                    "several stagers; install the same holdfast on all machines"
                )

    def on_stager_lost(self) -> None:
        """Note that the stager is lost: training waits for no message of it."""

    def _handle_refused(self, session: StagerSession, frame: Frame) -> None:
        body = wire.json_body(frame, code=str, message=str)
        error = peer_error(body["code"], body["message"])
        if session.requests.resolve_proposal(error):
            return
        if not isinstance(error, PeerLost):
            raise error
        # Other ranks asked, and this one was missing. Its link still works.
        _log.error("rank %d did not join a save() started by other ranks: %s", self._rank, error)


class StagerInbox(ShareInbox):
    """Messages of the only stager, or of the lead of several. Link's thread."""

    def __init__(self, rank: int, agreed_steps: AgreedSteps, schedule: Schedule) -> None:
        super().__init__(rank, lambda: agreed_steps.promises.last_step)
        self._agreed_steps, self._schedule = agreed_steps, schedule
        # Called with each doubt of a rank, in the link's thread; set before the first save.
        self.on_doubt: Callable[[Doubt], None] = lambda _: None

    def handle(self, session: StagerSession, frame: Frame) -> None:
        match frame.kind:
            case Kind.SAVE_AT:
                answer = self._agreed_steps.handle(Announcement.from_frame(frame))
                self._reply(session, frame, Kind.AT, answer)
            case Kind.SAVE_EVERY:
                seconds = self._agreed_steps.step_seconds
                answer = self._schedule.handle(Announcement.from_frame(frame), seconds)
                self._reply(session, frame, Kind.HERE, answer)
            case Kind.DOUBTED:
                self.on_doubt(Doubt.from_frame(frame))
            case Kind.RESERVED:
                session.requests.resolve_proposal(Agreement.from_frame(frame))
            case _:
                super().handle(session, frame)

    def on_stager_lost(self) -> None:
        self._agreed_steps.end()
        self._schedule.end()

    def _reply(self, session: StagerSession, frame: Frame, kind: Kind, answer: StepAnswer | None) -> None:
        if answer is not None:
            session.port.send(answer.to_frame(kind, attempt=frame.attempt))
