"""The interface that a training rank has to the stager, whether the job has a stager (`Link`) or none (`NoStager`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from holdfast.errors import HoldfastError
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
from trainer_side.notice.appointments import Appointments
from trainer_side.ranks.peers import Peers
from trainer_side.tiers.tier_set import TierSet
from trainer_side.transfer import SliceSource, Transfer, TransferState


class TimesLost(NamedTuple):
    """How often the stager was lost, and for how many seconds altogether, until now where it still is."""

    losses: int = 0
    seconds: float = 0.0


class ToStager(Protocol):
    """The way of this rank's checkpoints to the stager. Training thread, unless a member says otherwise.

    Attributes:
        rank: This training rank. `ranks`: how many there are.
        events: Event log; may be replaced before the first offer.
        appointments: At which step this rank acts on a notice.
        on_doubt: Called when the stager says that a rank has seen its state change as the gate does not hold it back.
    """

    rank: int
    ranks: int
    events: EventLog
    appointments: Appointments
    on_doubt: Callable[[Doubt], None]

    @property
    def attempt(self) -> int:
        """Attempt of the job as the stager gave it, another one once it was lost and reached again; 0 without one."""
        ...

    @property
    def peers(self) -> Peers:
        """The other ranks; before the first step only."""
        ...

    @property
    def store_url(self) -> str:
        """URL of the run."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk."""
        ...

    @property
    def problem(self) -> HoldfastError | None:
        """Why the stager is lost now; None while it is not, and without a stager. Any thread."""
        ...

    @property
    def times_lost(self) -> TimesLost:
        """How often and how long the stager was lost. Any thread."""
        ...

    def has_lost(self, error: HoldfastError) -> bool:
        """Whether this error is how the stager was lost, be it reached again or not."""
        ...

    @property
    def lives(self) -> bool:
        """Whether a stager takes steps now. Any thread."""
        ...

    @property
    def staged_step(self) -> int:
        """Newest step that is staged; -1 before the first. Any thread."""
        ...

    @property
    def durable_step(self) -> int:
        """Newest step that is durable; -1 before the first. Any thread."""
        ...

    @property
    def new_pickle_reserve_bytes(self) -> int:
        """Room that rank 0's pickle was given after it had outgrown its reserve; 0 before."""
        ...

    def beside(self, tiers: TierSet) -> None:
        """The rank's local tiers, once they are open: checkpoints go on in them when the stager is lost."""
        ...

    def auto_interval(self) -> tuple[Schedule, Callable[[Wish], None] | None]:
        """For `every="auto"`: when this rank saves, and on rank 0 how to ask the stager for another interval.

        Raises:
            ConfigError: There is no stager.
        """
        ...

    def hurry(self, seconds_max: float) -> None:
        """From now on `agree` waits no longer than that for the other ranks."""
        ...

    def agree(self, proposal: Proposal) -> Agreement:
        """Compare this rank's tensors with those of the others, through the stager. Collective.

        Raises:
            StateError: The ranks hold different tensors.
            PeerLost: The stager is lost, or a rank did not answer in time.
        """
        ...

    def fetch(
        self, asked: Asked, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        """Bytes that the stager's ring still has; None if it has not. Any thread."""
        ...

    def fits(self, step: int) -> None:
        """Say that this rank's state fits the layout at this step, which it does not offer now."""
        ...

    def announce(self, layout: Layout) -> None:
        """Use `layout` for all later offers. Every rank calls it with the same one."""
        ...

    def offer(self, step: int, source: SliceSource, record: SaveRecord) -> Transfer:
        """Offer the checkpoint of `step`; returns at once. `source` must stay as it is until the transfer is released.

        Raises:
            StateError: No layout was announced.
        """
        ...

    def answer(self, step: int) -> Reason | None:
        """Why `step`, which this rank has not offered yet, is not taken; None as far as is known. Any thread."""
        ...

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        """Tell all ranks, through the stager, that this rank takes no checkpoint of `step`. Any thread."""
        ...

    def doubt(self, doubt: Doubt) -> None:
        """Tell all ranks and the flusher, through the stager. Any thread."""
        ...

    def notice(self, notice: Notice) -> None:
        """Tell who brings the ranks to one step that this rank's machine will be taken away. Any thread."""
        ...

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """Wait until what was offered is durable (or staged), and leave. Safe to call twice."""
        ...
