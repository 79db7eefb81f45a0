"""The interface between a rank and its local tiers, for ranks with tiers and without.

A save makes the same calls in both cases. The base classes here serve a rank without tiers: there are no slots, and the
ranks agree through the stager. `LocalTiers` and `CommitVotes` serve a rank with tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from holdfast.errors import HoldfastError
from holdfast.image.layout import Layout
from holdfast.image.proof_record import Digest
from holdfast.image.save_record import SaveRecord
from holdfast.notices.notice import Notice
from holdfast.telemetry.causes import Reason
from holdfast.wire.doubt import Doubt
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.background_thread import ThreadDied
from trainer_side.tiers.tier import Order, Tier
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.transfer import SliceSource


class RankCouncil:
    """How the training ranks agree on one layout, and on one step after a notice. Training thread, except `notice`.

    This class serves ranks without tiers: `agree` is `ToStager.agree`, and the link talks to the stager about the rest.
    """

    def __init__(self, agree: Callable[..., Agreement]) -> None:
        self._agree = agree
        self._seconds_max: float | None = None

    @property
    def new_pickle_reserve_bytes(self) -> int:
        """Room for rank 0's pickle after it outgrew its reserve; 0 before."""
        return 0

    def agree(self, proposal: Proposal) -> Agreement:
        """Compare this rank's tensors with those of the others; as `ToStager.agree`."""
        return self._agree(proposal, seconds_max=self._seconds_max)

    def limit_wait(self, seconds_max: float) -> None:
        """Limit the wait of later `agree` calls."""
        self._seconds_max = seconds_max

    def confirm_ready(self, error: HoldfastError | None) -> None:
        """Tell the other ranks that this rank has prepared its tiers for the first layout, or why not. Collective.

        Raises `error`, or another rank's error with its rank. PeerLost: a rank did not answer in time.
        """
        if error is not None:
            raise error

    def send_fits(self, step: int) -> None:
        """Tell rank 0 that this rank saves the step with the agreed layout, and will not propose another."""

    def announce_room(self, needed_bytes: int) -> None:
        """Tell all ranks the new room for rank 0's pickle, which has outgrown its reserve. Rank 0 only."""

    def send_doubt(self, doubt: Doubt) -> None:
        """Tell all ranks, through rank 0, that steps of this rank may be torn. Any thread."""

    def set_doubt_callback(self, call: Callable[[Doubt], None]) -> None:
        """Register a callback for each doubt of a rank, in the thread of the votes."""

    def send_notice(self, notice: Notice) -> None:
        """Tell rank 0 that this rank's machine will be taken away, so that all ranks save one step. Any thread."""


class TierSet:
    """The local tiers of this rank. Training thread, unless a member says otherwise."""

    tiers: Sequence[Tier] = ()  # nearest first
    names = ""  # of the tiers, for people
    attempt = 0  # in the names of this job's slices; 0 without tiers
    complete_step = -1  # newest step of this job that every rank has sealed in some tier; any thread
    last_begun: Order = (0, -1)  # the step begun last in some tier, as its slices name it
    keeps_proofs = False  # whether a tier keeps proofs of slices; the same on every rank

    def __init__(self, council: RankCouncil) -> None:
        # How the ranks agree: among themselves if there are tiers, otherwise through the stager.
        self.council = council

    @property
    def accepts_steps(self) -> bool:
        """Whether a step that the stager does not take can still be kept here."""
        return False

    @property
    def died(self) -> ThreadDied | None:
        """The error that has ended a thread of the tiers; None while all threads live. Any thread."""
        return None

    @property
    def is_direct(self) -> bool:
        """Whether the slots of the first tier are the staging areas."""
        return False

    @property
    def is_prepared(self) -> bool:
        """Whether the tiers have room for slices of some layout; without tiers there is nothing to prepare."""
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no slice is in flight to a tier, and every sealed slice has its verdict. Any thread."""
        return True

    def set_restored(self, order: Order, intact_in: Collection[str] = ()) -> None:
        """Note that training resumes from this checkpoint; newer steps that were found are dropped.

        `intact_in`: Places with the whole checkpoint: tiers by name, or the store. Another tier, in which a slice is
        damaged or missing, falls back to the newest older step that it has whole. Empty: the state was put together
        from several tiers, so each keeps its part until there is a newer step.
        """

    def set_attempt(self, attempt: int) -> None:
        """Assign later slices to this attempt, in which the stager was reached again, if it is a newer one."""

    def prepare(self, layout: Layout) -> None:
        """Make room for slices of this layout. No slice may be in flight.

        Raises as `Tier.prepare` for the first layout. A tier that refuses a later layout is logged and no longer used,
        but does not end the training.
        """

    def slot_memories(self) -> Sequence[memoryview]:
        """Return the slots that are staging areas, in the order of first use; empty unless `is_direct`."""
        return ()

    def await_slot(self, number: int) -> bool:  # noqa: ARG002
        """Wait until a slot of `slot_memories` may be touched; False if it will not be made. Any thread."""
        return True

    def stop_making_slots(self) -> None:
        """Make no further slots, because no further step will follow. Any thread."""

    def begin(self, step: int, record: SaveRecord, *, wait_until: float = 0.0) -> TierWrite | None:
        """Take a slot in each tier; None if no tier has a slot. The caller then calls `keep` or `drop`.

        Waits until `wait_until` (`time.monotonic`) for slots that may still become free.
        """

    def keep(self, write: TierWrite, area: SliceSource | None) -> None:
        """Write the step, as its frames get ready in `area`."""

    def drop(self, write: TierWrite, reason: Reason) -> None:
        """Free the slots of a step that is not copied after all."""

    def keep_proof(self, order: Order, digest: Digest) -> None:
        """Keep the digest of this rank's step after `order` beside its slices, once they are sealed."""

    def skip(self, step: int, reason: Reason) -> None:
        """Tell the other ranks that this rank takes no checkpoint of `step`, so that they do not wait for it."""

    def release_area(self, write: TierWrite) -> None:
        """Release the step's area, even if a tier is still using it."""

    def mark_doubtful(self, doubt: Doubt) -> None:
        """Mark slices of these steps in the tiers, also later ones. Any thread; `close` waits for the devices."""

    def close(self, seconds_max: float) -> None:
        """Wait until slices in flight are sealed and have their verdicts, then close the tiers. Safe to call twice."""
