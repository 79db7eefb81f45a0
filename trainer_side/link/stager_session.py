"""What a rank has with one stager, from its WELCOME until that stager is lost."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.config import TrainerConfig
from holdfast.telemetry.events import EventLog
from trainer_side.link.greeting import Greeted
from trainer_side.link.outbox import Outbox, StagerSilence
from trainer_side.link.questions import Questions


class StagerSession:
    """See the module. For the link's thread, except where its parts say otherwise.

    Args:
        config: Settings.
        greeted: The way to the stager, and what it said.
        rank: This training rank.
        events: The event log as it is now.
        command: Has something done in the link's thread.
        clock: Seconds that only go forward.
        before: The session that was lost before this one. What was durable stays so; what was only staged may be gone
            with the machine of the lost stager.

    Attributes:
        port, welcome: Of `greeted`.
        outbox: The checkpoints on their way.
        questions: What the stager was asked.
        silence: For how long nothing was heard.
    """

    def __init__(
        self,
        config: TrainerConfig,
        greeted: Greeted,
        *,
        rank: int,
        events: Callable[[], EventLog],
        command: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        before: StagerSession | None = None,
    ) -> None:
        self.port, self.welcome = port, welcome = greeted
        self.outbox = Outbox(port, welcome.attempt, events)
        if before is not None:
            self.outbox.staged_step = self.outbox.durable_step = before.outbox.durable_step
            self.outbox.new_pickle_reserve_bytes = before.outbox.new_pickle_reserve_bytes
        self.questions = Questions(config, port, welcome, rank=rank, command=command)
        self.silence = StagerSilence(rank, max(config.stager_seconds_max, 2 * welcome.beat_seconds), clock)
