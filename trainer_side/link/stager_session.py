"""The parts of the link that belong to one stager, from its WELCOME until that stager is lost."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.config import TrainerConfig
from holdfast.telemetry.events import EventLog
from trainer_side.link.greeting import Greeted
from trainer_side.link.job_state import JobState
from trainer_side.link.open_requests import OpenRequests
from trainer_side.link.outbox import Outbox, StagerSilence


class StagerSession:
    """See the module. For the link's thread, except where its parts say otherwise.

    Args:
        greeted: The port of the stager, and its WELCOME.
        job: As this rank knows it.
        command: Runs a function in the link's thread.
        clock: Seconds that only go forward.

    Attributes:
        outbox: The checkpoints on their way.
        requests: Proposals and fetches without an answer.
        silence: How long the stager has sent nothing.
    """

    def __init__(
        self,
        config: TrainerConfig,
        greeted: Greeted,
        job: JobState,
        events: EventLog,
        *,
        command: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self.port, self.welcome = port, welcome = greeted
        self.outbox = Outbox(port, job, events)
        self.requests = OpenRequests(config, port, welcome, rank=job.rank, command=command)
        self.silence = StagerSilence(
            job.rank, max(config.stager_seconds_max, 2 * welcome.beat_seconds), clock
        )
