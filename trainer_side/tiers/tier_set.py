"""What the rest of this rank needs of its local tiers, whether it has any (`Keeper`) or none (`NoTiers`).

A save asks for the same things in both cases; without tiers there are no slots, and the ranks agree through the stager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from holdfast.errors import HoldfastError
from holdfast.image.layout import Layout
from holdfast.notices.notice import Notice
from holdfast.telemetry.causes import Reason
from holdfast.wire.doubt import Doubt
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.background_thread import ThreadDied
from trainer_side.tiers.keeping import Keeping
from trainer_side.tiers.tally import Order
from trainer_side.tiers.tier import Tier
from trainer_side.transfer import SliceSource


class RankCouncil(Protocol):
    """How the training ranks come to one layout, and to one step after a notice. Training thread, except `notice`."""

    @property
    def new_pickle_reserve_bytes(self) -> int:
        """Room that rank 0's pickle was given after it had outgrown its reserve; 0 before."""
        ...

    def agree(self, proposal: Proposal) -> Agreement:
        """Compare this rank's tensors with those of the others. Collective; waits for the slowest rank.

        Raises:
            StateError: The ranks hold different tensors: which rank, which tensor, expected, got.
            PeerLost: A rank did not answer in time.
        """
        ...

    def concur(self, error: HoldfastError | None) -> None:
        """Say that this rank has prepared its tiers for the first layout, or why not. Collective.

        Raises:
            HoldfastError: `error`, or that of another rank, which it names.
            PeerLost: A rank did not answer in time.
        """
        ...

    def fits(self, step: int) -> None:
        """Say that this rank saves the step with the layout that was agreed on: it will propose nothing for it."""
        ...

    def make_room(self, needed_bytes: int) -> None:
        """Rank 0 only: its pickle has outgrown its reserve. All ranks hear how much it gets."""
        ...

    def doubt(self, doubt: Doubt) -> None:
        """Tell all ranks, through rank 0, that steps of this one may be torn. Any thread."""
        ...

    def when_doubted(self, call: Callable[[Doubt], None]) -> None:
        """Have this called with each doubt of a rank, in the council's thread."""
        ...

    def notice(self, notice: Notice) -> None:
        """Tell rank 0 that this rank's machine will be taken away, so that all ranks save one step. Any thread."""
        ...


class TierSet(Protocol):
    """The local tiers of this rank. Training thread, unless a method says otherwise."""

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers, nearest first; empty without any."""
        ...

    @property
    def names(self) -> str:
        """The tiers, for people; empty without any."""
        ...

    @property
    def attempt(self) -> int:
        """The attempt that the slices of this job have in their names; 0 without tiers."""
        ...

    @property
    def council(self) -> RankCouncil:
        """How the ranks agree: among themselves where there are tiers, otherwise through the stager."""
        ...

    @property
    def takes_steps(self) -> bool:
        """Whether a step that the stager does not take can still be kept here."""
        ...

    @property
    def died(self) -> ThreadDied | None:
        """What has ended a thread of the tiers; None while all live, and without tiers. Any thread."""
        ...

    @property
    def is_direct(self) -> bool:
        """Whether slots of the first tier are the staging areas."""
        ...

    @property
    def is_prepared(self) -> bool:
        """Whether the tiers have room for slices of some layout; without tiers there is nothing to prepare."""
        ...

    @property
    def complete_step(self) -> int:
        """Newest step of this job that every rank has sealed in some tier; -1 before the first. Any thread."""
        ...

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way into a tier, and all that is sealed has its verdict. Any thread."""
        ...

    def restored(self, order: Order, whole_in: Collection[str] = ()) -> None:
        """The state is that of this checkpoint, which lies whole in these tiers or the store. See `Keeper.restored`."""
        ...

    def follow(self, attempt: int) -> None:
        """The stager was reached again, as this attempt: later slices belong to it. Nothing, if they do already."""
        ...

    def prepare(self, layout: Layout) -> None:
        """Make room for slices of this layout. No slice is on its way.

        Raises:
            ConfigError: A tier is too small for the first layout, not ours, or in use.
            StoreError: A device refused.
        """
        ...

    def slot_memories(self) -> Sequence[memoryview]:
        """The slots that are staging areas, in the order of first use; empty where none is (`is_direct`)."""
        ...

    def begin(
        self, step: int, record: Mapping[str, Any], *, stager_lives: bool = False, wait_until: float = 0.0
    ) -> Keeping | None:
        """Take a slot in each tier; None if none has one. Follow it by `keep` or `drop`. See `Keeper.begin`."""
        ...

    def keep(self, keeping: Keeping, area: SliceSource | None) -> None:
        """Write it, as its frames get ready in `area`."""
        ...

    def drop(self, keeping: Keeping, reason: Reason) -> None:
        """Give back the slots of a step that is not copied after all."""
        ...

    def hurry(self, seconds_max: float) -> None:
        """From now on the council's answers are waited for no longer than that."""
        ...

    def skip(self, step: int, reason: Reason) -> None:
        """This rank takes no checkpoint of `step`; the others need not wait for it."""
        ...

    def let_go(self, keeping: Keeping) -> None:
        """Nothing may read its area any more, whatever a tier still does with it."""
        ...

    def doubt(self, doubt: Doubt) -> None:
        """Mark what the tiers keep, or will keep, of these steps. Any thread; `close` waits for the devices."""
        ...

    def close(self, seconds_max: float) -> None:
        """Wait until what is on its way is sealed and judged, then let go of the tiers. Safe to call twice."""
        ...


class StagerCouncil:
    """The council of ranks without local tiers: they agree through the stager.

    Args:
        agree: `ToStager.agree`.
    """

    new_pickle_reserve_bytes = 0  # the link hears of more room

    def __init__(self, agree: Callable[..., Agreement]) -> None:
        self._agree = agree
        self._seconds_max: float | None = None

    def agree(self, proposal: Proposal) -> Agreement:
        return self._agree(proposal, seconds_max=self._seconds_max)

    def hurry(self, seconds_max: float) -> None:
        """From now on `agree` waits no longer than that."""
        self._seconds_max = seconds_max

    def concur(self, error: HoldfastError | None) -> None:
        """Raise `error`, if there is one: without tiers the other ranks had nothing to prepare."""
        if error is not None:
            raise error

    def fits(self, step: int) -> None:
        """The offer of the step says it; without one, `StagerMessage.fits`."""

    def make_room(self, needed_bytes: int) -> None:
        """The decline that goes to the stager asks for it."""

    def doubt(self, doubt: Doubt) -> None:
        """The link tells the stager."""

    def when_doubted(self, call: Callable[[Doubt], None]) -> None:
        """The link hears it."""

    def notice(self, notice: Notice) -> None:
        """The link tells the stager."""


class NoTiers:
    """The local tiers of a rank that has none.

    Args:
        agree: `ToStager.agree`.
    """

    tiers: Sequence[Tier] = ()
    names = ""
    attempt = 0
    takes_steps = is_direct = False
    is_prepared = is_idle = True
    complete_step = -1
    died: ThreadDied | None = None

    def __init__(self, agree: Callable[..., Agreement]) -> None:
        self.council = StagerCouncil(agree)

    def restored(self, order: Order, whole_in: Collection[str] = ()) -> None:
        """No tier holds anything that is out of date."""

    def follow(self, attempt: int) -> None:
        """No slice belongs to an attempt."""

    def prepare(self, layout: Layout) -> None:
        """There is nothing to make room in."""

    def slot_memories(self) -> Sequence[memoryview]:
        """There is no slot."""
        return ()

    def begin(
        self, step: int, record: Mapping[str, Any], *, stager_lives: bool = False, wait_until: float = 0.0
    ) -> Keeping | None:
        """There is no slot."""

    def keep(self, keeping: Keeping, area: SliceSource | None) -> None:
        """Never called: `begin` gives no slot."""

    def drop(self, keeping: Keeping, reason: Reason) -> None:
        """Never called: `begin` gives no slot."""

    def hurry(self, seconds_max: float) -> None:
        self.council.hurry(seconds_max)

    def skip(self, step: int, reason: Reason) -> None:
        """The link tells the other ranks, through the stager."""

    def let_go(self, keeping: Keeping) -> None:
        """Never called: `begin` gives no slot."""

    def doubt(self, doubt: Doubt) -> None:
        """Nothing is kept here."""

    def close(self, seconds_max: float) -> None:
        """There is nothing to wait for."""
