"""The live page: correct figures, 2 and 64 ranks, hostile names, and stable parts."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from holdfast.telemetry.event_reading import Log, LoggedEvent
from holdfast.telemetry.status_document import RankStatus, StatusLine, read_status
from holdfast.telemetry.status_state import StatusState
from operator_side.live.live_page import live_page
from operator_side.report.facts import RunFacts, gather_facts
from operator_side.status.run_status import Peer, RunStatus
from tests.unit.operator_side.page.reading import Page, loads_nothing, policy_of, tiles_of
from tests.unit.operator_side.report.logs import EVENTS, STATUS, facts_of
from tests.unit.operator_side.status.test_run_status import NOW, done, in_ring, ring, said, status

_HOSTILE = "</title><script>alert(1)</script><img src=x onerror=y> \"' & \x1b[2J http://evil.example/x"
_LINKS = ("#", "data:", "status.json", "?run=")


def run(ranks: int, host: str = "spot", text: str = "") -> RunStatus:
    rows = [
        RankStatus(rank=n, host=host, step=40, state="lost" if n == 1 else "here", quiet_seconds=1.0)
        for n in [1, *(n for n in range(ranks) if n != 1)]
    ]
    line = StatusLine(at_unix=NOW - 5, event="rank_lost", step=40, text=text).model_dump()
    stager = said(
        "stager",
        *(done(step, pgt1_seconds=1.0, pgt2_seconds=2.0, stall_seconds=0.1) for step in (20, 40)),
        ranks=[row.model_dump() for row in rows],
        ranks_total=ranks,
        problems=[line],
        interval_why=text,
    )
    return status(
        stager_document=stager, ring=ring(in_ring(60, "receiving")), dollars_per_hour=3600.0, notes=[text]
    )


def shown(found: RunStatus, facts: RunFacts | None = None, is_full_page: bool = True) -> str:
    return live_page(found, facts, every_seconds=1.0, is_full_page=is_full_page).decode()


@pytest.mark.parametrize("ranks", [2, 64])
def test_live_page_shows_every_rank_and_loads_nothing(ranks: int) -> None:
    text = shown(run(ranks))
    loads_nothing(text, _LINKS)
    assert policy_of(text)["connect-src"] == "'self'"
    body = Page(text).of("body")[0]
    assert (body["data-every"], body["data-main"]) == ("1.0", "main")
    assert f"{ranks} ranks: {ranks - 1} here, 1 lost" in Page(text).text
    strip = re.findall(r'<li class="(\w+)" title="[^"]*">(\d+)</li>', text)
    if ranks == 2:
        assert strip == []
    else:
        assert strip == [("lost" if n == 1 else "training", str(n)) for n in range(64)]
        assert "and 56 more ranks, in no worse state" in text


def test_tiles_say_what_a_kill_loses_and_how_far_the_run_is() -> None:
    tiles = tiles_of(shown(run(2)))
    assert tiles == {
        "last good step": "40",
        "a kill now loses": "~60 steps",
        "with the stager&#39;s node": "~60 steps",
        "newest staged step": "40",
        "newest durable step": "40",
    }
    assert "60.0 s, $60.00; resumes from step 40" in shown(run(2))


def test_the_page_begins_with_what_the_run_does_or_how_it_ended() -> None:
    def state(found: RunStatus, *events: LoggedEvent) -> tuple[str, str]:
        text = shown(found, gather_facts("r", Log(list(events))))
        shown_as: list[tuple[str, str]] = re.findall(
            r'</h1>\s*<p class="(\w+)"><span class="dot">■</span> ([^<]*)</p>', text
        )
        return shown_as[0]

    gone = status(flusher=Peer("gone"), stager=Peer("gone"))
    silent = status(stager=Peer("silent"))
    launched = LoggedEvent(NOW - 100, "launched", "supervisor", None, None, {"attempt": 1})
    killed = LoggedEvent(NOW, "ended", "supervisor", None, None, {"cause": "killed", "message": "by SIGKILL"})
    done_well = LoggedEvent(NOW, "ended", "supervisor", None, None, {"cause": "done", "message": "well"})
    at = "attempt 1 ended at 1970-01-01 02:46:40 UTC"
    assert state(run(2)) == ("back", "some ranks are missing")
    assert state(status(stager_document=said("stager", ranks=[{"rank": 0}]))) == ("training", "training")
    assert state(silent, launched) == ("back", "the stager does not answer")
    assert state(gone) == ("idle", "no training job is running")
    assert state(gone, launched) == ("starting", "attempt 1 was launched 2 min ago; no stager is here")
    assert state(gone, launched, killed) == ("lost", f"{at} (killed): by SIGKILL")
    assert state(gone, launched, done_well) == ("idle", f"{at} (done): well")


def test_ranks_that_are_still_coming_have_nothing_to_lose() -> None:
    rows = [RankStatus(rank=0, state="coming").model_dump()]
    found = status(stager_document=said("stager", done(20), done(40), ranks=rows, ranks_total=1))
    assert found.is_running
    assert (found.loss_trainers.steps, found.loss_trainers.seconds) == (0, 0.0)


def test_logs_add_kills_goodput_and_losses() -> None:
    facts = facts_of(STATUS, EVENTS, price=12.4)
    tiles = tiles_of(shown(run(2), facts))
    assert list(tiles.items())[:5] == [
        ("goodput", "~10 %"),
        ("steps lost", "~5"),
        ("cost", "$0.29"),
        ("last good step", "40"),
        ("interruptions", "3"),
    ]
    assert "loss" not in tiles
    events = [
        LoggedEvent(NOW, "loss", "stager", None, step, {"loss": 2.0 - step / 1000}) for step in range(1000)
    ]
    text = shown(run(2), gather_facts("r", Log(events)))
    assert tiles_of(text)["loss"] == "1.001"
    losses = json.loads(Page(text).of("figure")[0]["data-chart"] or "")
    points = losses["series"][0]["data"]
    assert points[-1] == {"x": 999, "y": 1.001}
    assert len(points) <= 500


def test_a_run_without_logs_shows_the_losses_that_its_stager_heard() -> None:
    state = StatusState("stager", "r", ranks=list, clock=lambda: NOW)
    for step, loss in ((11, 3.0), (21, 2.0), (21, 1.5)):
        state.handle_event("loss", {"attempt": 1, "loss": loss}, step)
    text = shown(
        status(stager_document=read_status(json.loads(state.build_document().model_dump_json()), "here"))
    )
    assert tiles_of(text)["loss"] == "1.5"
    (losses,) = (json.loads(one["data-chart"] or "") for one in Page(text).of("figure"))
    assert losses["series"][0]["data"] == [{"x": 11, "y": 3.0}, {"x": 21, "y": 1.5}]


def test_a_training_loss_and_a_metric_are_not_one_curve() -> None:
    record = {"ranks": {"0": {"metrics": {"val_loss": 9.0}}}}
    events = [LoggedEvent(NOW, "durable", "flusher", None, step, {"record": record}) for step in (10, 20)]
    assert gather_facts("r", Log(events)).losses == [(10, 9.0), (20, 9.0)]
    events += [LoggedEvent(NOW, "loss", "stager", None, step, {"loss": 1.0}) for step in (11, 21)]
    assert gather_facts("r", Log(events)).losses == [(11, 1.0), (21, 1.0)]


def test_charts_go_on_with_the_logs_when_the_store_has_only_the_checkpoints_that_are_kept() -> None:
    stager = said("stager", *(done(step, pgt1_seconds=1.0) for step in (80, 90)))
    events = []
    for at, attempt, step in ((0, 1, 10), (5, 1, 20), (9, 2, 15), (12, 2, 30)):
        record = {"ranks": {"0": {"saved_at_unix": NOW + at}}}
        fields = {"attempt": attempt, "pgt2_seconds": 2.0, "record": record}
        events.append(LoggedEvent(NOW + at + 2, "durable", "flusher", None, step, fields))
    text = shown(status(stager_document=stager), gather_facts("r", Log(events)))
    progress, durations = (json.loads(one["data-chart"] or "") for one in Page(text).of("figure"))
    assert [point["y"] for point in progress["series"][0]["data"]] == [10, 20, 15, 30], "a loss is a fall"
    assert [point["x"] for point in durations["series"][0]["data"]] == [10, 20, 15, 30]
    assert progress["yTitle"] == "step"
    assert durations["yTitle"] == "time"


def test_kills_are_marked_in_the_progress() -> None:
    facts = facts_of(STATUS, EVENTS)
    progress = json.loads(Page(shown(run(2), facts)).of("figure")[0]["data-chart"] or "")
    assert [(one["name"], one["marks"]) for one in progress["series"]] == [
        ("saved steps", []),
        ("killed or lost", [one.attempt.stopped_at_unix for one in facts.interruptions]),
    ]
    assert len(facts.interruptions) == 3


def test_the_interval_is_said_once() -> None:
    stager = said("stager", done(30), done(45), interval_why="every 15 steps: 0.9 % stall")
    line = "interval: every 15 steps or 15.0 s, from the last two saves; auto: 0.9 % stall"
    assert line in Page(shown(status(stager_document=stager))).text


def test_an_attempt_that_runs_or_starts_reaches_to_now() -> None:
    events = [
        LoggedEvent(NOW - 100, "launched", "supervisor", None, None, {"attempt": 1}),
        LoggedEvent(NOW - 90, "training", "supervisor", None, None, {"attempt": 1}),
    ]
    starts = status(flusher=Peer("gone"), stager=Peer("gone"))
    for found, said_so, name, began in (
        (run(2), 2, "training", NOW - 90),
        (starts, 1, "starting", NOW - 100),
    ):
        figures = Page(shown(found, gather_facts("r", Log(events[:said_so])))).of("figure")
        series = json.loads(figures[-1]["data-chart"] or "")["series"][0]
        assert (series["name"], series["data"][0]["x"]) == (name, [began, NOW])


def test_hostile_names_are_texts() -> None:
    found = dataclasses.replace(run(64, _HOSTILE, _HOSTILE), run=_HOSTILE)
    text = live_page(found, None, every_seconds=1.0, others=[_HOSTILE, "b"]).decode()
    loads_nothing(text, _LINKS)
    assert "\x1b" not in text
    assert "<script>alert(1)</script>" in Page(text).text
    assert not any(key.startswith("on") for _, attributes in Page(text).tags for key in attributes)


def test_the_part_that_is_fetched_again_is_the_one_in_the_page() -> None:
    """Each of its parts has an id of its own, by which page.js finds the one to replace."""
    part, whole = shown(run(64), is_full_page=False), shown(run(64))
    assert part.strip() in whole
    assert "<script" not in part
    assert len(part) < 40_000
    children = re.findall(r"^<(?:header|dl|section|p|nav)\b[^>]*>", part, re.MULTILINE)
    ids = [attributes["id"] for name, attributes in Page(part).tags if "id" in attributes]
    assert {"head", "tiles", "progress", "durations", "ranks", "flights", "interval"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert children
