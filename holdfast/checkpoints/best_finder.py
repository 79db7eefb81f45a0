"""The best checkpoint of a run by a metric, found as its manifests are read: `holdfast ls`, `holdfast pull --best`."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.checkpoints.branches import Branches
from holdfast.checkpoints.catalog import Catalog, CatalogItem
from holdfast.errors import ConfigError, StoreMissing
from holdfast.image.best_rule import BestMode, BestRule, no_best_error, rule_of
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest


class BestCheckpoint(NamedTuple):
    """The best checkpoint so far, and its value."""

    order: CheckpointId
    value: float
    rule: BestRule


class _Rated(NamedTuple):
    order: CheckpointId
    metrics: dict[str, float]
    has_caveat: bool


class BestFinder:
    """Collects the metrics of checkpoints, newest first. `metric`, `mode`: None: as the newest writer recorded."""

    def __init__(self, metric: str | None = None, mode: BestMode | None = None) -> None:
        self._metric, self._mode = metric, mode
        self._rated: list[_Rated] = []
        self._recorded: list[BestRule] = []

    def add(self, item: CatalogItem) -> None:
        """Add one checkpoint. A bad or damaged one is never best."""
        manifest = item.manifest
        if manifest is None:
            return
        if manifest.best is not None and manifest.best not in self._recorded:
            self._recorded.append(manifest.best)
        if item.is_good and manifest.metrics:
            self._rated.append(_Rated(item.order, manifest.metrics, bool(item.caveat)))

    def best(self) -> BestCheckpoint | None:
        """Return the best of all that were added; None if none has the metric, or no mode is known."""
        rule = self._rule()
        if rule is None:
            return None
        rated = [one for one in self._rated if rule.metric in one.metrics]
        if not rated:
            return None
        first = min(rated, key=lambda one: rule.key(one.metrics, one.order, has_caveat=one.has_caveat))
        return BestCheckpoint(first.order, first.metrics[rule.metric], rule)

    def none_found_error(self, where: str) -> StoreMissing | ConfigError:
        """Return the error that says why no checkpoint of the run `where` is best."""
        return no_best_error(where, self._metric or "", [one.metrics for one in self._rated])

    def _rule(self) -> BestRule | None:
        if self._metric is None:
            return self._recorded[0] if self._recorded else None
        return rule_of(self._metric, self._mode, self._recorded)


def find_best(catalog: Catalog, metric: str, mode: BestMode | None = None) -> Manifest:
    """Return the manifest of the best good checkpoint of a run, on its current branch. Reads every manifest. Raises
    `StoreMissing` if no checkpoint has this metric, naming the metrics there are; `ConfigError` if the run does not say
    which value is best.
    """
    listing, finder = catalog.read_listing(), BestFinder(metric, mode)
    branches = listing.branches or Branches()
    for item in listing.items():
        if branches.is_current(item.order):
            finder.add(item)
    best = finder.best()
    if best is None:
        raise finder.none_found_error(listing.url)
    for item in listing.items(
        [listed for listed in listing.manifests if listed.order.step == best.order.step]
    ):
        if item.order == best.order and item.manifest is not None:
            return item.manifest
    raise StoreMissing(f"{listing.url}: {best.order}, the best by {metric}, was removed meanwhile")
