"""In place of the link, in a job that has local tiers and no stager: the same questions, answered without one.

World (no stager) ─► Alone: who the ranks are; every step ends here for the stager, at once
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError
from holdfast.faultpoint import identify
from holdfast.image.layout import Layout
from holdfast.notices.notice import Notice
from holdfast.ring.remains import Asked
from holdfast.telemetry.events import EventLog
from trainer_side.notice.appointments import Appointments
from trainer_side.transfer import SliceSource, Transfer, TransferState

if TYPE_CHECKING:
    from trainer_side.ranks.mpi import MpiPeers, World
    from trainer_side.tiers.council import Council


class Alone:
    """What `Link` is where there is a stager. Training thread.

    Args:
        config: Settings; `store` names the run.
        world: The job.

    Attributes:
        rank: This training rank. `ranks`: how many there are.
        peers: The other ranks.
        events: Event log.
        appointments: At which step this rank acts on a notice. `council`: who agrees on it; set with the tiers.
        problem: None: nothing is lost. `staged_step`, `durable_step`: -1, nothing is staged.
        store_url: URL of the run. `chunk_bytes`: size of a chunk.

    Raises:
        ConfigError: `store` is not set.
    """

    def __init__(self, config: TrainerConfig, world: World) -> None:
        if config.store is None:
            raise ConfigError(
                f"no stager in this MPI job of {world.ranks} trainers, and tiers without store: the run has no name; "
                "set store (HOLDFAST_STORE) to its URL, or add `: -n 1 holdfast stager --store URL` to the mpirun line"
            )
        identify(f"rank:{world.rank}")
        self.rank, self.ranks = world.rank, world.ranks
        self.peers: MpiPeers = world.peers()
        self.events = EventLog(None, role="trainer", rank=self.rank)
        self.problem: HoldfastError | None = None
        self.staged_step = self.durable_step = -1
        self.new_pickle_reserve_bytes = 0
        self.goes_on_in = ""
        self.council: Council | None = None
        self.appointments = Appointments(wait_seconds_max=config.stager_seconds_max)
        self.store_url, self.chunk_bytes = config.store, config.chunk_bytes

    def announce(self, layout: Layout) -> None:
        """Nobody needs it."""

    def offer(self, step: int, source: SliceSource, record: dict[str, Any]) -> Transfer:  # noqa: ARG002
        """Nobody takes it."""
        return Transfer.none(step, record)

    def fetch(
        self, asked: Asked, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> None:
        """There is no ring."""

    def answer(self, _step: int) -> None:
        """Nobody declines it."""

    def decline(self, step: int, reason: str, *, needed_pickle_bytes: int = 0) -> None:
        """Nobody waits for it."""

    def notice(self, notice: Notice) -> None:
        """Tell rank 0, in the stager's place, that this rank's machine will be taken away. Any thread."""
        assert self.council is not None, "tiers are opened before the watch"
        self.council.notice(notice)

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """There is nothing to wait for."""
