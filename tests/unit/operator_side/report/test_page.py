"""The page parsed as by a browser: complete, accessible, loads nothing, immune to hostile log content."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from holdfast.telemetry.rows import CheckpointRow
from operator_side.report.page import thinned
from operator_side.report.run_charts import losses_chart
from tests.unit.operator_side.page.reading import Page, loads_nothing, tiles_of
from tests.unit.operator_side.report.logs import (
    EVENTS,
    STATUS,
    T0,
    Line,
    checkpoint,
    facts_of,
    page_of,
    written,
)

_PAGE_BYTES_MAX = 1_000_000
_HOSTILE = (
    "</title></style><script>alert(1)</script><img src=x onerror=y> \"' & \x1b[2J\u202e http://evil.example/x"
)


def real_page() -> Page:
    return Page(page_of(facts_of(STATUS, EVENTS, price=12.4)))


def test_page_is_whole_and_loads_nothing() -> None:
    loads_nothing(page_of(facts_of(STATUS, EVENTS)))


def test_tiles_come_first_with_the_figures_of_the_run() -> None:
    text = page_of(facts_of(STATUS, EVENTS, price=12.4))
    assert text.index('class="tiles"') < text.index('class="panel"')
    assert tiles_of(text) == {
        "goodput": "~10 %",
        "steps lost": "~5",
        "cost": "$0.29",
        "last good step": "64",
        "interruptions": "3",
    }
    assert list(tiles_of(text))[:4] == ["goodput", "steps lost", "cost", "last good step"]


def test_charts_show_attempts_parts_of_the_time_and_durations() -> None:
    charts = [json.loads(one["data-chart"] or "") for one in real_page().of("figure")]
    assert [chart["lanes"] for chart in charts] == [
        ["job", "to staged", "to durable", "read back", "trouble"],
        ["time"],
        [],
    ]
    timeline, time, durations = charts
    drawn = {one["name"]: one for one in timeline["series"]}
    assert len(drawn["killed, lost or bad"]["data"]) == 3
    assert len(drawn["training"]["data"]) == 4
    assert len(drawn["starting"]["data"]) == 1, "as in the parts of the time, a start that follows no loss"
    assert len(drawn["getting back after losses"]["data"]) == 6, "each loss has an end and a start"
    assert "killed by SIGKILL" in drawn["killed, lost or bad"]["data"][1]["text"]
    bars = [bar["x"] for one in time["series"] for bar in one["data"]]
    assert [begin for begin, _ in bars[1:]] == [end for _, end in bars[:-1]], (
        "the parts lie one after the other"
    )
    assert [(one["name"], len(one["data"])) for one in durations["series"]] == [
        ("stall of training", 4),
        ("save() to staged", 4),
        ("save() to durable", 4),
    ]
    colours = [
        {one["colour"]: one["name"] for one in chart["series"]} for chart in (timeline, time, durations)
    ]
    assert all(len(names) == len(chart["series"]) for names, chart in zip(colours, charts, strict=True))


def test_every_axis_has_a_title(tmp_path: Path) -> None:
    losses: list[Line] = [(float(n), "trainer", "save", {"rank": 0, "step": n, "loss": 2.0}) for n in (1, 2)]
    pages = (facts_of(STATUS, EVENTS), facts_of(written(tmp_path / "log", losses)))
    charts = [
        json.loads(one["data-chart"] or "") for facts in pages for one in Page(page_of(facts)).of("figure")
    ]
    assert len(charts) == 4
    assert all(chart["xTitle"] and (chart["yTitle"] or chart["lanes"]) for chart in charts)


def test_a_long_table_is_closed_until_it_is_asked_for(tmp_path: Path) -> None:
    """On a phone 200 checkpoints are 50 screens."""
    for count, has in ((24, False), (25, True)):
        lines = [line for step in range(count) for line in checkpoint(step, 10.0 * step)]
        text = page_of(facts_of(written(tmp_path / str(count), lines)))
        assert (f"<summary>Oldest first: {count} checkpoints</summary>" in text) is has


def test_commands_in_sentences_are_code(tmp_path: Path) -> None:
    text = page_of(facts_of(written(tmp_path / "log", checkpoint(1, 0.0))))
    assert "<code>holdfast run</code>" in text
    assert "`" not in Page(text).text


def test_losses_that_were_logged_are_drawn(tmp_path: Path) -> None:
    lines: list[Line] = [
        (1.0, "trainer", "save", {"rank": 0, "step": 10, "metrics": {"val_loss": 2.5, "accuracy": 0.1}}),
        (
            2.0,
            "flusher",
            "durable",
            {"step": 20, "attempt": 1, "record": {"ranks": {"0": {"metrics": {"loss": 2}}}}},
        ),
        (3.0, "trainer", "save", {"rank": 0, "step": 30, "loss": _HOSTILE, "metrics": {"loss": 1.5}}),
        (4.0, "trainer", "save", {"rank": 0, "step": 40, "metrics": {"loss": float("nan")}, "record": [1]}),
    ]
    facts = facts_of(written(tmp_path / "log", lines))
    assert facts.losses == [(10, 2.5), (20, 2.0), (30, 1.5)]
    charts = [json.loads(one["data-chart"] or "") for one in Page(page_of(facts)).of("figure")]
    assert [point["y"] for point in charts[-1]["series"][0]["data"]] == [2.5, 2.0, 1.5]


def test_kills_are_marked_in_the_loss_where_training_resumed() -> None:
    interruptions = facts_of(STATUS, EVENTS).interruptions
    resumed = [one.recovery.restored_step for one in interruptions if one.recovery is not None]
    chart = losses_chart([(1, 2.0), (64, 1.0)], interruptions)
    assert [(one.name, list(one.marks)) for one in chart.series] == [
        ("loss", []),
        ("killed, resumed from this step", sorted({max(0, step) for step in resumed if step is not None})),
    ]
    assert chart.series[1].marks


def test_page_is_accessible() -> None:
    found = real_page()
    assert found.of("html")[0]["lang"] == "en"
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name, attributes in found.tags:
        for key in ("aria-labelledby", "href"):
            for target in (attributes.get(key) or "").split():
                if key == "aria-labelledby" or target.startswith("#"):
                    assert target.removeprefix("#") in ids, (name, target)
    assert all(one["role"] == "img" and one["aria-label"] for one in found.of("canvas"))
    assert len(found.of("caption")) == len(found.of("table")), "every table says what it shows"
    assert all(cell["scope"] in {"col", "row"} for cell in found.of("th"))
    assert [name for name, _ in found.tags].count("h1") == 1
    assert any(one.get("name") == "viewport" for one in found.of("meta"))


def test_every_section_is_there_and_has_its_figures() -> None:
    found = real_page()
    sections = {one["id"] for one in found.of("section")}
    everything = {
        "timeline",
        "interruptions",
        "goodput",
        "times",
        "ring",
        "troubles",
        "checkpoints",
        "unknown",
    }
    assert sections == everything, "no step was declined in it"
    for words in (
        "host vm had a notice that it will be taken",
        "ended 3.25 s, launched 1.34 s, joined 7.80 s, restored 4.24 s, training 65.0 ms",
        "step 19",
        "work done twice",
        "save() to durable",
        "stalls are those of the slowest rank",
        "emergency_staged",
        "Step 4, attempt 1: verified, durable after 0.67 s",
        "How full the ring was, and how large it is, is not in the logs",
        "Points to check",
    ):
        assert words in found.text


def test_hostile_names_are_texts(tmp_path: Path) -> None:
    lines: list[Line] = [
        (0.0, "stager", "stager_ready", {"attempt": 1, "ranks": 1}),
        (1.0, "trainer", "declined", {"rank": 0, "step": 1, "reason": _HOSTILE, "cause": _HOSTILE}),
        (2.0, "flusher", "bad", {"step": 2, "attempt": 1, "note": _HOSTILE}),
        (3.0, "stager", "rank_lost", {"lost_rank": _HOSTILE, "reason": _HOSTILE}),
        (
            4.0,
            "trainer",
            "save",
            {"rank": 0, "step": 3, "host": _HOSTILE, "saved_at_unix": T0, "save_seconds": 1.0},
        ),
        (5.0, "supervisor", "launched", {"attempt": 1, "hosts": [_HOSTILE, 3], "message": _HOSTILE}),
        (6.0, "supervisor", "training", {"attempt": 1, "seconds": "x", "ended_seconds": [1]}),
        (7.0, "supervisor", "ended", {"attempt": 1, "cause": _HOSTILE, "message": _HOSTILE}),
        (8.0, "supervisor", "over", {"cause": "lost", "message": _HOSTILE}),
    ]
    path = written(tmp_path / "log", lines)
    text = page_of(facts_of(path, run=f"/mnt/{_HOSTILE}"))
    found = Page(text)
    loads_nothing(text)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<script>alert(1)</script>" in found.text, "it is shown as what it is"
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert all((one["href"] or "").startswith(("#", "data:")) for one in [*found.of("a"), *found.of("link")])


def test_half_a_surrogate_pair_is_spelled_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"time":1800000000,"event":"rank_lost","role":"stager","reason":"\\ud800"}\n')
    assert "\\ud800" in page_of(facts_of(path))


def test_a_broad_table_names_the_column_of_each_cell() -> None:
    """On a phone its rows are cards."""
    text = page_of(facts_of(STATUS, EVENTS, price=12.4))
    broad = re.findall(r'<table class="many[^>]*>\s*<caption>([^<]*)', text)
    assert {"Interruptions", "Attempts"} <= set(broad)
    found = Page(text)
    columns = {one.get("data-column") for one in found.of("td")}
    assert {"time until training", "work lost", "steps", "cost"} <= columns
    assert None not in columns


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    found = Page(page_of(facts_of(written(tmp_path / "log", []))))
    assert "Nothing is known of this run" in found.text
    assert {one["id"] for one in found.of("section")} == {"unknown"}


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    count, ranks = 10_000, 24
    with path.open("w") as log:

        def say(at: float, role: str, event: str, **fields: Any) -> None:
            log.write(json.dumps({"time": T0 + at, "event": event, "role": role} | fields) + "\n")

        for number in range(1, 51):
            began = (number - 1) * 20_000.0
            say(began, "supervisor", "launched", attempt=number, ranks=ranks, hosts=["h" * 60] * ranks)
            say(began, "stager", "stager_ready", attempt=number)
            say(began, "supervisor", "restored", step=number * 200 - 201, attempt=number)
            say(began + 1, "supervisor", "training", attempt=number, seconds=1.0, joined_seconds=1.0)
            for step in range((number - 1) * 200, number * 200):
                at = began + 10 + 90.0 * (step % 200)
                times = {"saved_at_unix": T0 + at, "cst_seconds": 0.1, "save_seconds": 0.1}
                said = dict.fromkeys(map(str, range(ranks if step % 100 == 99 else 2)), times)
                common = {"step": step, "attempt": number, "image_bytes": 1 << 33}
                say(
                    at + 60,
                    "flusher",
                    "durable",
                    record={"ranks": said},
                    pgt2_seconds=60.0 + step % 7,
                    **common,
                )
                if step % 4:
                    continue
                say(at + 61, "trainer", "declined", rank=0, step=10**6 + step, reason="r" * 900, cause="busy")
                say(
                    at + 62,
                    "stager",
                    "rank_silent",
                    silent_rank=1,
                    name=f"rank 1 at {step} {'n' * 500}",
                    seconds=30.0,
                )
            state = "bad" if number % 2 else "verified"
            say(began + 19_000, "flusher", state, step=number * 200 - 1, attempt=number, note="x" * 900)
            say(began + 19_500, "supervisor", "ended", attempt=number, cause="killed", message="m" * 900)
    facts = facts_of(path)
    assert len(facts.rows) == count
    text = page_of(facts)
    assert len(text.encode()) < _PAGE_BYTES_MAX
    found = Page(text)
    for words in ("of 10,000 checkpoints are shown", "of 2,500 steps are shown", "of 2,525 lines are shown"):
        assert words in found.text
    assert "16 of 24 ranks are shown" in found.text
    assert "2,500 steps got no checkpoint" in found.text, "what is counted is counted over all"


def test_thinning_keeps_what_stands_out() -> None:
    items = [CheckpointRow(1, step, "bad" if step in {500, 501} else "verified") for step in range(1000)]
    few = [row.step for row in thinned(items, 20)]
    assert len(few) == 20
    assert few == sorted(few)
    assert {0, 500, 501, 999} <= set(few)
    assert max(b - a for a, b in itertools.pairwise(few)) < 100, "spread over all of it"
    bad = [CheckpointRow(1, step, "bad") for step in range(1000)]
    assert [row.step for row in thinned(bad, 5)] == [0, 996, 997, 998, 999]
    assert thinned(range(1000), 1) == [999]
    assert thinned([1, 2], 5) == [1, 2]
