"""The replacement of the link in a job with local tiers and no stager, where no step goes further than the tiers."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError
from holdfast.faultpoint import identify
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.notices.notice import Notice
from holdfast.ring.remains import Asked
from holdfast.telemetry.causes import Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from holdfast.wire.pace import Wish
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.link.schedule import Schedule
from trainer_side.link.to_stager import TimesLost
from trainer_side.notice.appointments import Appointments
from trainer_side.ranks.peers import Peers
from trainer_side.ranks.ports import World
from trainer_side.tiers.tier_set import StagerCouncil, TierSet
from trainer_side.transfer import SliceSource, Transfer, TransferState


class NoStager:
    """A `ToStager` that leads to no stager. Training thread.

    Args:
        config: Settings; `store` names the run.
        world: The job.

    Attributes:
        rank: This training rank. `ranks`: how many there are.
        peers: The other ranks.
        events: Event log.
        appointments: At which step this rank acts on a notice; the ranks' council agrees on it.
        store_url: URL of the run. `chunk_bytes`: size of a chunk.

    Raises:
        ConfigError: `store` is not set.
    """

    attempt = 0
    problem: HoldfastError | None = None
    lives = False
    staged_step = durable_step = -1
    new_pickle_reserve_bytes = 0

    def __init__(self, config: TrainerConfig, world: World) -> None:
        if config.store is None:
            raise ConfigError(
                f"no stager in this job of {world.ranks} trainers, and tiers without store: the run has no name; set "
                f"store (HOLDFAST_STORE) to its URL, or {world.stager_advice}"
            )
        identify(f"rank:{world.rank}")
        self.rank, self.ranks, self._advice = world.rank, world.ranks, world.stager_advice
        self.peers: Peers = world.peers()
        self.events = EventLog(None, role="trainer", rank=self.rank)
        self.on_doubt: Callable[[Doubt], None] = lambda _: None
        self._tiers = TierSet(StagerCouncil(self.agree))
        self.appointments = Appointments(wait_seconds_max=config.stager_seconds_max)
        self.store_url, self.chunk_bytes = config.store, config.chunk_bytes

    @property
    def times_lost(self) -> TimesLost:
        return TimesLost()

    def has_lost(self, error: HoldfastError) -> bool:  # noqa: ARG002
        """There is none to lose."""
        return False

    def beside(self, tiers: TierSet) -> None:
        """The tiers whose council brings the ranks to one step after a notice."""
        self._tiers = tiers

    def auto_interval(self) -> tuple[Schedule, Callable[[Wish], None] | None]:
        """Refuse: only a stager brings all ranks to another interval.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            'every="auto" needs a stager, which brings all ranks to the same steps, and this job has none; '
            f"{self._advice}, or give a number of steps"
        )

    def hurry(self, seconds_max: float) -> None:
        """Nobody is asked here."""

    def agree(self, proposal: Proposal) -> Agreement:  # noqa: ARG002
        """Refuse: the council of the local tiers compares the tensors of the ranks.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"rank {self.rank}: no stager in this job, and no local tiers: nobody compares the tensors of the ranks; "
            f"{self._advice}, or set tiers (HOLDFAST_TIERS)"
        )

    def fits(self, step: int) -> None:
        """The council of the local tiers hears it."""

    def announce(self, layout: Layout) -> None:
        """Nobody needs it."""

    def offer(self, step: int, source: SliceSource, record: SaveRecord) -> Transfer:  # noqa: ARG002
        return Transfer.none(step, record)

    def fetch(
        self, asked: Asked, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> None:
        """There is no ring."""

    def answer(self, _step: int) -> None:
        """Nobody declines it."""

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        """Nobody waits for it."""

    def doubt(self, doubt: Doubt) -> None:
        """The council of the local tiers tells the ranks."""

    def notice(self, notice: Notice) -> None:
        """Tell rank 0, in the stager's place, that this rank's machine will be taken away. Any thread."""
        self._tiers.council.notice(notice)

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """There is nothing to wait for."""
