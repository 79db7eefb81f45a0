"""Room for slices of one layout in every tier of this rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.errors import HoldfastError
from holdfast.image.layout import Layout
from holdfast.image.slices import SliceFrame, frames_of
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.tiers.found_steps import FoundSteps
from trainer_side.tiers.lane import Lane

_log = logging.getLogger("holdfast.trainer.tiers")


class TierRoom:
    """See the module. Training thread.

    Args:
        rank: This rank.
        lanes: One for each tier.
        found: What the tiers are told when they make room for the first time.
        writers: Threads for each tier; None: as many as its device needs.
        seconds_max: How long a tier may take to make room.

    Attributes:
        layout: The layout that there is room for; None before the first.
        frames: The frames of this rank's slice.
    """

    def __init__(
        self,
        rank: int,
        lanes: Sequence[Lane],
        found: FoundSteps,
        *,
        writers: int | None,
        seconds_max: float,
    ) -> None:
        self._rank, self._lanes, self._found = rank, lanes, found
        self._writers, self._seconds_max = writers, seconds_max
        self.layout: Layout | None = None
        self.frames: tuple[SliceFrame, ...] = ()
        self._left_out: dict[int, Reason] = {}

    def problem(self, number: int) -> Reason | None:
        """Why a tier takes nothing now; None while it does."""
        return self._left_out.get(number) or self._lanes[number].calls.hangs

    def prepare(self, layout: Layout) -> None:
        """Make room for slices of this layout. No slice is on its way.

        A tier that refuses a later layout than the first is left out from then on. The log says so, but a tier is no
        reason to end a training.

        Raises:
            ConfigError: A tier is too small for the first layout, not ours, or in use.
            StoreError: A device refused.
        """
        for number, lane in enumerate(self._lanes):
            try:
                self._prepare(number, lane, layout)
            except HoldfastError as error:
                if self.layout is None:
                    raise
                self._left_out[number] = DeclineCause.FAILED.because(
                    f"it has no room for the new layout: {error}"
                )
                _log.error("rank %d: tier %s takes nothing more: %s", self._rank, lane.tier.name, error)
                continue
            self._left_out.pop(number, None)
            lane.staff(self._writers or lane.tier.writers)
            _log.info("rank %d: tier %s: %s", self._rank, lane.tier.name, lane.tier.how)
        self.layout, self.frames = layout, frames_of(layout, self._rank)

    def _prepare(self, number: int, lane: Lane, layout: Layout) -> None:
        tier, is_first = lane.tier, self.layout is None

        def prepare() -> None:
            tier.prepare(layout, self._rank)
            if is_first:
                for verdict in self._found.verdicts(number, tier.name):
                    (tier.complete if verdict.complete else tier.void)(*verdict.order)

        # Not in the training thread: a device that hangs must not hold that up.
        lane.calls.ask("making room for slices", prepare, seconds_max=self._seconds_max, late=lambda _: None)
