"""The sections of the page, in their order. Each is None where nothing is known."""

from __future__ import annotations

from operator_side.report.facts import RunFacts
from operator_side.report.markup import ROWS_MAX, Html, moment, said, section, table, thin
from operator_side.report.pictures import thinned
from operator_side.report.section_checkpoints import checkpoints
from operator_side.report.section_losses import goodput, interruptions
from operator_side.report.section_timeline import timeline
from operator_side.report.section_times import ring, times


def declined(facts: RunFacts) -> Html | None:
    """Steps without a checkpoint: the number for each cause, and each step with its reason."""
    found = facts.checkpoints.not_taken
    if not found:
        return None
    shown = thinned(found, ROWS_MAX, lambda one: one.kind == "failed")
    rows = [
        (
            moment(one.at_unix),
            str(one.step),
            str(one.attempt),
            one.kind,
            said(one.cause),
            said(one.reason),
            str(one.ranks) if one.ranks else "-",
        )
        for one in shown
    ]
    columns = ("when", "step", "attempt", "what", "cause", "reason", "ranks")
    causes = [(said(cause), f"{count:,}") for cause, count in facts.checkpoints.causes.most_common(ROWS_MAX)]
    return section(
        "declined",
        "Steps that were not checkpointed",
        table("By cause", ("cause", "steps"), causes, numbers=("steps",)),
        table("Each of them", columns, rows, numbers=("step", "attempt", "ranks")),
        thin(shown, found, "step", "given-up ones, and of the others evenly chosen ones"),
    )


def troubles(facts: RunFacts) -> Html | None:
    found = facts.happened
    if not found:
        return None
    shown = thinned(found, ROWS_MAX, lambda one: one.is_notice)
    rows = [
        (
            moment(one.at_unix),
            "notice" if one.is_notice else "trouble",
            said(one.event),
            "-" if one.step is None else str(one.step),
            said(one.text),
            str(one.times),
        )
        for one in shown
    ]
    columns = ("first at", "kind", "event", "step", "message", "times")
    return section(
        "troubles",
        "Notices and troubles",
        table("docs/format.md says what each event means", columns, rows, numbers=("step", "times")),
        thin(shown, found, "line", "notices, and of the others evenly chosen ones"),
    )


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
