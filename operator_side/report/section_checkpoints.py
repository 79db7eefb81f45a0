"""The section with each checkpoint, and with some of them rank by rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.command.output import size
from holdfast.telemetry.rows import CheckpointRow, RankTimes
from operator_side.report.facts import RunFacts
from operator_side.report.markup import (
    ROWS_MAX,
    Html,
    brief,
    keys,
    moment,
    plural,
    said,
    section,
    stands_out,
    table,
    tag,
    thin,
)
from operator_side.report.pictures import Bar, BarRow, lanes, thinned

_DETAILED_MAX = 12  # checkpoints shown rank by rank
_RANKS_MAX = 16


def checkpoints(facts: RunFacts) -> Html | None:
    """A table of the checkpoints, and some of them rank by rank."""
    found = facts.rows
    if not found:
        return None
    shown = thinned(found, ROWS_MAX, stands_out)
    rows = [
        (
            str(row.step),
            str(row.attempt),
            said(_state(row)),
            "yes" if row.in_store else "-",
            size(row.image_bytes),
            moment(row.saved_at_unix),
            brief(row.stall_seconds),
            brief(row.pgt1_seconds),
            brief(row.pgt2_seconds),
        )
        for row in shown
    ]
    columns = ("step", "attempt", "state", "in the store", "size", "saved", "CST", "PGT-1", "PGT-2")
    numbers = ("step", "attempt", "size", "CST", "PGT-1", "PGT-2")
    detailed = _worth_details(found)
    return section(
        "checkpoints",
        "Checkpoints",
        table("Oldest first", columns, rows, numbers=numbers),
        thin(
            shown, found, "checkpoint", "the first, the last, bad and unfinished ones, and evenly chosen ones"
        ),
        tag("h3", "Rank by rank"),
        tag(
            "p",
            f"{plural(len(detailed), 'checkpoint')} of {len(found):,}: the slowest to durable, those that held up "
            "training longest, bad and failed ones, and the newest. Seconds are since each rank's own save().",
            class_="faint",
        )
        if detailed
        else tag("p", "Neither the manifests nor the logs have times of ranks."),
        *(_rank_by_rank(row) for row in detailed),
    )


def _state(row: CheckpointRow) -> str:
    if row.note:
        return f"{row.state}: {row.note}"
    return f"{row.state}, {plural(row.nonfinite, 'number')} not finite" if row.nonfinite else row.state


def _worth_details(rows: Sequence[CheckpointRow]) -> list[CheckpointRow]:
    known = [row for row in rows if row.ranks]
    few = _DETAILED_MAX // 4
    chosen = known[-few:]
    chosen += sorted(known, key=lambda row: row.pgt2_seconds or 0.0)[-few:]
    chosen += sorted(known, key=lambda row: row.stall_seconds or 0.0)[-few:]
    chosen += [row for row in known if row.state in {"bad", "drifted", "doubtful", "failed"}][-few:]
    keys = {(row.attempt, row.step) for row in chosen}
    return [row for row in known if (row.attempt, row.step) in keys]


def _rank_by_rank(row: CheckpointRow) -> Html:
    name = f"ranks-{row.attempt}-{row.step}"
    ranks = sorted(row.ranks.items())
    worst = sorted(ranks, key=lambda one: one[1].seconds.get("cst_seconds", 0.0))[-_RANKS_MAX:]
    shown = sorted(worst)
    drawn = [BarRow(f"rank {rank}", list(_rank_phases(times, row))) for rank, times in shown]
    longest = max((bar.end for lane in drawn for bar in lane.bars), default=0.0)
    cells = [
        (
            str(rank),
            said(times.host) or "-",
            size(times.slice_bytes),
            *(
                brief(times.seconds.get(f"{key}_seconds"))
                for key in ("cst", "save", "gate", "copy", "sending", "sent")
            ),
        )
        for rank, times in shown
    ]
    columns = (
        "rank",
        "host",
        "slice",
        "CST",
        "in save()",
        "at the gate",
        "copy",
        "until the stager took it",
        "until sent",
    )
    about = "Stages of each rank's slice, in seconds since its save(); the table below has the figures."
    return tag(
        "details",
        tag(
            "summary",
            f"Step {row.step}, attempt {row.attempt}: {row.state}, durable after {brief(row.pgt2_seconds)}",
        ),
        lanes(f"{name}-picture", f"Ranks of step {row.step}", about, drawn, 0.0, longest, is_clock=False)
        if longest > 0
        else None,
        keys(
            ("stall", "in save()"),
            ("idle", "waits for the stager"),
            ("start", "on its way to staged"),
            ("work", "to durable"),
        ),
        table(
            f"Ranks of step {row.step} (attempt {row.attempt})",
            columns,
            cells,
            numbers=("rank", *columns[2:]),
        ),
        thin(shown, ranks, "rank", "those held up longest"),
    )


def _rank_phases(times: RankTimes, row: CheckpointRow) -> Iterable[Bar]:
    """Save, wait, send, durable. Ends that the rank itself does not tell are those of the checkpoint."""
    ends = [
        ("stall", "in save()", times.seconds.get("save_seconds")),
        ("idle", "waits for the stager", times.seconds.get("sending_seconds")),
        (
            "start",
            "on its way to staged",
            times.seconds.get("staged_seconds") or _since(times, row.staged_at_unix),
        ),
        ("work", "to durable", times.seconds.get("durable_seconds") or _since(times, row.durable_at_unix)),
    ]
    at = 0.0
    for class_, words, end in ends:
        if end is not None and end > at:
            yield Bar(at, end, class_, f"{words}: {brief(end - at)}")
            at = end


def _since(times: RankTimes, at_unix: float | None) -> float | None:
    return None if at_unix is None or times.saved_at_unix is None else max(0.0, at_unix - times.saved_at_unix)
