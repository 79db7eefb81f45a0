"""The objects that every part of a save works with on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config import TrainerConfig
from holdfast.telemetry.events import EventLog
from trainer_side.ledger import Ledger
from trainer_side.link.to_stager import ToStager
from trainer_side.save.fresh_run_check import FreshRunCheck
from trainer_side.tiers.tier_set import TierSet


@dataclass(frozen=True)
class RankContext:
    """Made once by the `Checkpointer`, and passed to every part of a save."""

    config: TrainerConfig
    link: ToStager
    tiers: TierSet
    ledger: Ledger
    events: EventLog
    fresh_run: FreshRunCheck
