"""What each tier is told of the steps that were found in it, before the first step of this job. Pure."""

from __future__ import annotations

from collections.abc import Collection

from trainer_side.tiers.kept_slices import Inventory
from trainer_side.tiers.tally import Order, StepVerdict


class FoundSteps:
    """Protects the newest step that all ranks have whole until there is a newer one.

    Args:
        inventory: The steps that were found, per tier.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._restored: Order | None = None
        self._whole_in: frozenset[str] = frozenset()

    def restored(self, order: Order, whole_in: Collection[str]) -> None:
        """The state is that of this checkpoint. See `Keeper.restored`."""
        self._restored, self._whole_in = order, frozenset(whole_in)

    def verdicts(self, number: int, name: str) -> list[StepVerdict]:
        """What to tell a tier, in this order.

        The step to be kept is named first, and the newer ones, which are of no use, after it: a rank that is killed in
        between leaves everything as it was found.
        """
        complete, partial = self._inventory.complete[number], self._inventory.partial[number]
        limit = self._restored
        damaged = bool(self._whole_in) and name not in self._whole_in  # damaged here, and whole elsewhere
        usable = [
            order for order in complete if limit is None or order < limit or (order == limit and not damaged)
        ]
        verdicts = [StepVerdict(number, order, complete=True) for order in usable[:1]]
        if limit is None:
            return verdicts
        for order in (*complete, *partial):
            # A damaged step has its seals. A step that an earlier job has given up lacks those that were overwritten.
            is_behind = order > usable[0] if usable else order == limit and order in complete
            if order > limit or (damaged and is_behind):
                verdicts.append(StepVerdict(number, order, complete=False))
        return verdicts
