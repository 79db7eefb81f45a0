"""The sections of the page, in their order. Each is None where nothing is known."""

from __future__ import annotations

from operator_side.report.section_checkpoints import checkpoints
from operator_side.report.section_lists import declined, troubles
from operator_side.report.section_losses import goodput, interruptions
from operator_side.report.section_timeline import timeline
from operator_side.report.section_times import ring, times

__all__ = ["SECTIONS"]

SECTIONS = {
    "timeline": ("Timeline", timeline),
    "interruptions": ("Interruptions", interruptions),
    "goodput": ("Goodput and cost", goodput),
    "times": ("How long", times),
    "ring": ("Ring and rates", ring),
    "declined": ("Not taken", declined),
    "troubles": ("Troubles", troubles),
    "checkpoints": ("Checkpoints", checkpoints),
}
