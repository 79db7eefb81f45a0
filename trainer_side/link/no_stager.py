"""The replacement of the link in a job without a stager, whose steps go to local tiers alone."""

from __future__ import annotations

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.faultpoint import identify
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.ring.remains import FetchKind
from holdfast.telemetry.causes import Reason
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.link.job_state import JobState
from trainer_side.link.stager_message import StagerMessage
from trainer_side.ranks.world import World
from trainer_side.transfer import SliceSource, Transfer, TransferState


class NoStager:
    """A `ToStager` for a job without a stager; the council of the local tiers does its work. Training thread.

    ConfigError: `store` is not set.
    """

    def __init__(self, config: TrainerConfig, world: World) -> None:
        if config.store is None:
            raise ConfigError(
                f"no stager in this job of {world.ranks} trainers, and tiers without store: the run has no name; set "
                f"store (HOLDFAST_STORE) to its URL, or {world.stager_advice}"
            )
        identify(f"rank:{world.rank}")
        self._advice = world.stager_advice
        self.job = JobState(
            world.rank, world.ranks, store_url=config.store, chunk_bytes=config.chunk_bytes, attempt=None
        )

    def agree(self, proposal: Proposal, *, seconds_max: float | None = None) -> Agreement:  # noqa: ARG002
        """Refuse with ConfigError: the council of the local tiers compares the tensors of the ranks."""
        raise ConfigError(
            f"rank {self.job.rank}: no stager in this job, and no local tiers, so the tensors of the ranks cannot be "
            f"compared; {self._advice}, or set tiers (HOLDFAST_TIERS)"
        )

    def offer(self, step: int, source: SliceSource, record: SaveRecord, layout: Layout) -> Transfer:  # noqa: ARG002
        return Transfer.not_sent(step, record)

    def decline_reason(self, step: int) -> None:
        """Return None: the council of the local tiers tells which rank has declined a step."""

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        """Do nothing: the council of the local tiers tells the other ranks."""

    def send_message(self, message: StagerMessage) -> None:
        """Do nothing: the council of the local tiers is told instead."""

    def fetch(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> None:
        """Return None: there is no ring."""

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """Do nothing: no step is in flight to a stager."""
