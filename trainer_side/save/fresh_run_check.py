"""Checks, before the first byte of the first save, whether this job resumes its run or starts a new one.

    restore() was called, whatever it found ────────────────────────────────► resumes
    it was not; rank 0 looks into the store, each rank into its tiers:
                              nothing there ────────────────────────────────► a new run
                              checkpoints there ─ fresh=True ───────────────► a new run, with a warning
                                                └ otherwise ────────────────► refused, on all ranks alike

A script that forgot restore() trains from its random start, and its checkpoints are newer than the good ones: a later
restore would take them, and retention would remove the good ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.errors import ConfigError, HoldfastError, StoreError
from holdfast.image.manifest import is_manifest_name
from holdfast.store import open_store
from trainer_side.tiers.tier import Tier
from trainer_side.tiers.tier_inventory import list_kept

_log = logging.getLogger("holdfast.trainer")

_NAMED = 3


class FreshRunCheck:
    """Refuses to restart a run by accident. Training thread. `seconds_max`: For a tier to list its checkpoints."""

    def __init__(self, *, fresh: bool, seconds_max: float) -> None:
        self._fresh, self._seconds_max = fresh, seconds_max
        self.is_decided = False

    @property
    def has_chosen(self) -> bool:
        """Whether the script has chosen between a resume and a fresh start."""
        return self._fresh or self.is_decided

    def mark_restored(self) -> None:
        """Note that the script has called `restore()`. ConfigError: it has also set `fresh=True`."""
        if self._fresh:
            raise ConfigError(
                "restore() after Checkpointer(..., fresh=True): fresh=True starts a new training, so there is "
                "nothing to restore; leave out one of the two"
            )
        self.is_decided = True

    def refusal(
        self, store_url: str, tiers: Sequence[Tier], *, with_store: bool = True
    ) -> HoldfastError | None:
        """Return why the first save must be refused; None if it may proceed. Each rank asks once and tells the others:
        its own tiers may have checkpoints where another's were emptied. One rank also lists the store.
        """
        if self.is_decided:
            return None
        self.is_decided = True
        try:
            there = self._existing_checkpoints(store_url, tiers, with_store=with_store)
        except HoldfastError as error:
            if self._fresh:
                return None
            return StoreError(
                f"{store_url}: this script has not called restore(), and whether the run has checkpoints cannot be "
                f"seen: {error}; call restore() before the first step, or say Checkpointer(..., fresh=True)"
            )
        if not there:
            return None
        what = f"{len(there)} checkpoints ({', '.join(there[:_NAMED])}{', …' if len(there) > _NAMED else ''})"
        if self._fresh:
            _log.warning(
                "%s has %s; fresh=True starts a new training beside them: checkpoints of this job count as newer, and "
                "retention removes the others",
                store_url,
                what,
            )
            return None
        return ConfigError(
            f"{store_url} has {what}, and this script has not called restore(): its first save would replace them "
            "by a new training. Call checkpointer.restore() before the first step to go on with them; give "
            "another store; or say Checkpointer(..., fresh=True) to start a new training in this one"
        )

    def _existing_checkpoints(self, store_url: str, tiers: Sequence[Tier], *, with_store: bool) -> list[str]:
        """Return the names of checkpoints that a restore could use: the store's first, newest first."""
        found = []
        if store_url and with_store:
            names = sorted((info.name for info in open_store(store_url).list()), reverse=True)
            found += [name for name in names if is_manifest_name(name)]
        for tier in tiers:
            found += [f"{tier.name}: {kept.place}" for kept in list_kept(tier, self._seconds_max)]
        return found
