"""One status from several sources; its layout in 80 columns, without colour, and with many ranks."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.telemetry.rows import StoredCheckpoint
from holdfast.telemetry.status_document import CheckpointStatus, RankStatus, StatusDocument, StatusLine
from operator_side.commands.status_output import bar, render, spark
from operator_side.status.ring_files import RingCheckpoint, RingSnapshot
from operator_side.status.run_status import Interval, Peer, RunEvidence, RunStatus, compose
from operator_side.status.share_progress import ShareSnapshot
from tests.support.checkpoints import manifest_of, small_image

NOW = 10_000.0
GONE, HERE = Peer("gone"), Peer("here", 4711, NOW - 100)


def checkpoint(step: int, *, attempt: int = 1, **more: Any) -> CheckpointStatus:
    return CheckpointStatus(attempt=attempt, step=step, **more)


def done(step: int, **more: Any) -> CheckpointStatus:
    """A durable one that was saved `step` seconds after the job began."""
    at = NOW - 100 + step
    return checkpoint(step, saved_at_unix=at, staged_at_unix=at + 1, durable_at_unix=at + 2, **more)


def said(role: str, *checkpoints: CheckpointStatus, **more: Any) -> StatusDocument:
    return StatusDocument.model_validate(
        {"role": role, "run": "r", "pid": 1, "attempt": 1, "since_unix": NOW - 100, "now_unix": NOW}
        | {"checkpoints": [row.model_dump() for row in checkpoints]}
        | more
    )


@pytest.mark.parametrize("created", ["yesterday", "", "9999-99-99"])
def test_a_manifest_that_does_not_say_when_it_was_made_is_left_out(created: str) -> None:
    assert StoredCheckpoint.from_manifest(manifest_of(small_image(), step=1, created=created)) is None


def ring(*checkpoints: RingCheckpoint) -> RingSnapshot:
    return RingSnapshot(1, 4096, 8, {"free": 4, "filling": 1, "full": 3}, checkpoints)


def in_ring(step: int, state: Any = "staged", **more: Any) -> RingCheckpoint:
    return RingCheckpoint(1, step, state, 40960, 12288, 8192, more)


def status(**more: Any) -> RunStatus:
    price = more.pop("dollars_per_hour", None)
    return compose("r", NOW, RunEvidence(**{"flusher": HERE, "stager": HERE, **more}), dollars_per_hour=price)


def steps(found: RunStatus) -> dict[str, int]:
    return {name: level.step for name, level in found.levels.items()}


def shown(found: RunStatus, *, width: int = 80, ascii_only: bool = False, height: int | None = None) -> str:
    out = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    out.print(render(found, ascii_only=ascii_only, height=height))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def many(ranks: int = 64, flights: int = 100) -> RunStatus:
    """A run with all that there can be, long names among it."""
    long = "x" * 300
    rows = [
        RankStatus(rank=n, host=f"spot-{long}", step=1200, state="here", quiet_seconds=1.0)
        for n in range(ranks)
    ]
    lines = [StatusLine(at_unix=NOW - n, event="rank_lost", step=n, text=long) for n in range(16, 0, -1)]
    stager = said(
        "stager",
        *(done(step, pgt1_seconds=step / 7, pgt2_seconds=1e5, stall_seconds=1e-3) for step in range(20, 60)),
        ranks=[row.model_dump() for row in rows[:64]],
        ranks_total=ranks,
        interval_why=long,
        not_taken={"busy": 3, "no room at the stager": 1},
        declined=[line.model_dump() for line in lines],
        notices=[line.model_dump() for line in lines],
        problems=[line.model_dump() for line in lines],
    )
    flusher = said("flusher", checkpoint(199, held="no room: " + long), stager_attached=True)
    lying = ring(*(in_ring(100 + n, ranks={}) for n in range(flights)))
    return status(
        stager_document=stager,
        flusher_document=flusher,
        ring=lying,
        dollars_per_hour=1e6,
        notes=["the store: " + long],
    )


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        ("tls", "stager process 4711, 2 min, over TLS; "),
        ("tcp", "over TCP, not encrypted; "),
        ("mpi", "4711, 2 min; "),
    ],
)
def test_the_status_says_whether_the_ranks_traffic_is_encrypted(transport: str, words: str) -> None:
    found = status(stager_document=said("stager", transport=transport))
    assert found.document()["transport"] == transport
    assert words in shown(found, width=120)


def test_a_stager_that_waits_for_a_job_says_where_and_nothing_of_a_loss() -> None:
    found = status(stager_document=said("stager", waits_at="10.0.0.1:7700"), ring=ring())
    assert not found.is_running
    text = shown(found, width=120)
    assert "stager process 4711 waits for a job at 10.0.0.1:7700; " in text
    assert "LOSES" not in text
    staged = status(stager_document=said("stager", waits_at="10.0.0.1:7700"), ring=ring(in_ring(95)))
    assert "LOSES" in shown(staged), "a step that only the ring has is at risk without a job, too"


# -- what is put together ----------------------------------------------------------------------------------------------


def test_each_tells_what_it_knows_best() -> None:
    found = status(
        flusher_document=said("flusher", done(20, read_back="verified"), done(30)),
        stager_document=said(
            "stager", checkpoint(40, saved_at_unix=NOW - 60, staged_at_unix=NOW - 59, pgt1_seconds=1.0)
        ),
        ring=ring(in_ring(40), in_ring(50, "receiving")),
    )
    assert steps(found) == {"staged": 40, "durable": 30, "verified": 20}
    assert [(flight.step, flight.state, flight.written_bytes) for flight in found.flights] == [
        (40, "staged", 8192),
        (50, "receiving", 8192),
    ]
    assert found.loss_trainers.since_step == 40
    assert found.loss_node.since_step == 30


def test_a_bad_one_and_one_that_was_given_up_do_not_count() -> None:
    rows = (done(20), done(30, read_back="bad"), checkpoint(40, staged_at_unix=NOW - 1, failed="lost"))
    assert steps(status(flusher_document=said("flusher", *rows))) == {"staged": 20, "durable": 20}


def test_a_later_attempt_is_newer_though_its_step_is_lower() -> None:
    rows = (done(90), done(20).model_copy(update={"attempt": 2}))
    assert steps(status(flusher_document=said("flusher", *rows)))["durable"] == 20


def test_the_earlier_of_two_times_of_a_save_is_taken() -> None:
    found = status(
        flusher_document=said("flusher", checkpoint(5, saved_at_unix=NOW - 1, durable_at_unix=NOW - 1)),
        stager_document=said(
            "stager", checkpoint(5, saved_at_unix=NOW - 9, staged_at_unix=NOW - 8), ranks=[{"rank": 0}]
        ),
    )
    assert found.loss_node.seconds == 9


def test_without_a_flusher_the_store_and_the_ring_tell() -> None:
    stored = StoredCheckpoint(
        1, 20, "verified", 100, NOW - 50, NOW - 55, 1.0, 5.0, {"ranks": {"0": {"cst_seconds": 0.5}}}
    )
    staged = in_ring(30, ranks={"0": {"saved_at_unix": NOW - 40}}, stager={"staged_at_unix": NOW - 39})
    found = status(flusher=GONE, stager=GONE, ring=ring(staged), stored=[stored])
    assert steps(found) == {"staged": 30, "durable": 20, "verified": 20}
    assert (found.is_running, found.loss_trainers.seconds, found.loss_node.seconds) == (False, 0, 15)
    assert found.stall.last == 0.5


def test_a_job_whose_ranks_have_all_gone_does_not_run() -> None:
    lost = said("stager", ranks=[{"rank": 0, "state": "lost"}, {"rank": 1, "state": "left"}])
    assert not status(stager_document=lost).is_running
    assert status(stager_document=said("stager", ranks=[{"rank": 0, "state": "silent"}])).is_running


def test_the_interval_is_that_of_the_last_two_saves_of_one_job() -> None:
    found = status(flusher_document=said("flusher", done(20), done(30), done(45)))
    assert found.interval == Interval(15, 15.0)
    restarted = done(10).model_copy(update={"attempt": 2})
    assert status(flusher_document=said("flusher", done(20), restarted)).interval is None


def test_the_interval_has_the_stagers_reason_and_none_from_one_that_says_none() -> None:
    why = "every 15 steps: 0.9 % stall, expected loss 38 s per preemption"
    flusher, line = said("flusher", done(30), done(45)), "interval: every 15 steps or 15.0 s"
    found = status(flusher_document=flusher, stager_document=said("stager", interval_why=why))
    assert found.interval == Interval(15, 15.0, why)
    assert found.document()["interval"]["why"] == why
    assert f"{line}, from the last two saves\n  auto: 0.9 % stall, expected loss 38 s" in shown(found)
    another = said("stager", interval_why="every 41 steps: 0.1 % stall")
    assert "auto: every 41 steps: 0.1 % stall" in shown(
        status(flusher_document=flusher, stager_document=another)
    )
    for older in (said("stager"), None):
        found = status(flusher_document=flusher, stager_document=older)
        assert found.interval == Interval(15, 15.0)
        assert line in shown(found)
        assert "auto" not in shown(found)


def test_the_failures_are_those_of_the_interval_or_what_the_flusher_has_counted() -> None:
    line = "failures: 1 in 60 s observed, prior 1 in 3 h → one in 90 min"
    flusher = said("flusher", done(30), done(45), seen={"failures": 1, "seconds": 60.0})
    counted = "failures: 1 in 60 s observed, prior 1 in 3 h → one in 1.5 h"
    assert status(flusher_document=flusher, stager_document=said("stager")).failures == counted
    why = f"every 15 steps: 0.9 % stall; {line}"
    found = status(flusher_document=flusher, stager_document=said("stager", interval_why=why))
    assert found.failures == line
    assert f"auto: 0.9 % stall\n{line}" in shown(found)
    assert shown(found).count("failures:") == 1
    assert status(flusher_document=said("flusher"), stager_document=said("stager")).failures == ""


def test_the_document_is_json_and_has_all_of_it() -> None:
    found = json.loads(json.dumps(many().document()))
    assert set(found) >= {
        "run",
        "levels",
        "loss_trainers",
        "loss_node",
        "flights",
        "ring",
        "ranks",
        "pgt1_seconds",
    }
    assert len(found["ranks"]) == 64
    assert found["flights"][0]["step"] == 100
    assert status().document()["ring"] is None


def test_every_field_of_the_document_is_in_the_page() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/status.md").read_text()
    rows = [line.split("|") for line in page.partition("## JSON")[2].splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    found = many().document()
    assert told == set(found)
    cells = {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    for name in ("loss_trainers", "ring", "flusher", "interval"):
        assert set(found[name]) <= set(re.findall(r"`(\w+)`", cells[name])), name
    for name in ("flights", "ranks", "declined"):
        assert set(found[name][0]) <= set(re.findall(r"`(\w+)`", cells[name])), name


# -- how it looks ------------------------------------------------------------------------------------------------------


def test_the_status_says_what_a_newcomer_wants_to_know() -> None:
    text = shown(
        status(
            stager_document=said("stager", done(90), ranks=[{"rank": 0, "host": "spot-7", "step": 90}]),
            ring=ring(in_ring(95, "receiving")),
            dollars_per_hour=3600.0,
        )
    )
    for words in (
        "newest durable",
        "A KILL RIGHT NOW LOSES",
        "$10.00",
        "step 90",
        "1 rank: 1 here",
        "4 of 8 chunks",
    ):
        assert words in text
    assert "8.0 KiB of 40.0 KiB, 20%" in text


@pytest.mark.parametrize("ranks", [1, 64, 5000])
def test_eighty_columns_are_enough(ranks: int) -> None:
    lines = shown(many(ranks), height=24).splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.count("…") > 1], "a table was squeezed"


@pytest.mark.parametrize("height", [50, 30, 24, 18])
def test_the_status_fits_the_screen_and_keeps_the_loss_of_a_kill(height: int) -> None:
    text = shown(many(), height=height)
    assert len(text.splitlines()) <= height
    for words in ("newest durable", "A KILL RIGHT NOW LOSES", "and of the stager's node"):
        assert words in text


def test_without_a_window_nothing_is_left_out() -> None:
    assert len(shown(many()).splitlines()) > 50


def test_the_worst_ranks_and_the_newest_checkpoints_of_many_are_shown() -> None:
    text = shown(many(5000), width=400)
    assert "and 4,992 more ranks, in no worse state" in text
    assert "and 94 older checkpoints in flight" in text
    assert "13 earlier ones not shown" in text
    assert "held" in text
    assert "checkpoints not taken: 4 (3 busy, 1 no room at the stager)" in text


def test_without_colour_and_without_unicode_nothing_is_lost() -> None:
    text = shown(many(), ascii_only=True)
    assert "\x1b" not in text
    assert "###" in text
    out = Console(file=io.StringIO(), width=80, color_system="truecolor", force_terminal=True, no_color=True)
    out.print(render(many()))
    assert isinstance(out.file, io.StringIO)
    assert "\x1b[3" not in out.file.getvalue(), "colours"


def test_words_from_outside_do_not_steer_the_terminal() -> None:
    evil = "\x1b[2J[red]\x07"
    stager = said(
        "stager",
        ranks=[{"rank": 0, "host": evil}],
        problems=[{"at_unix": NOW, "event": evil, "text": evil}],
        not_taken={evil: 1},
        checkpoints=[done(80).model_dump(), done(90).model_dump()],
        interval_why=evil,
    )
    text = shown(
        compose(evil, NOW, RunEvidence(Peer("silent", note=evil), HERE, stager_document=stager, notes=[evil]))
    )
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text, "shown as it is, not obeyed"


def test_a_run_of_which_nothing_is_known_is_drawn_too() -> None:
    text = shown(status(flusher=GONE, stager=GONE))
    assert "no stager; no flusher" in text
    assert "no training job" in text


def test_bars_and_sparks() -> None:
    assert (bar(0.0, True), bar(1.0, True), bar(0.001, True, 4), bar(0.999, True, 4)) == (
        "." * 16,
        "#" * 16,
        "#...",
        "###.",
    )
    assert spark([1.0, 2.0, 9.0]) == "▁▂█"
    assert spark([3.0, 3.0]) == "▅▅"
    assert spark([]) == ""


# -- several stagers ------------------------------------------------------------------------------------------------


def test_each_share_of_the_step_in_flight_is_told_from_rings_and_seals() -> None:
    lead = said("flusher", checkpoint(15, share="1/4", sealed=("1/4", "3/4")))
    second = ShareSnapshot(1, ring(in_ring(15, "receiving")), said("flusher", checkpoint(15, share="2/4")))
    found = status(ring=ring(in_ring(15)), flusher_document=lead, others=(second,))
    assert [(one.share, one.state) for one in found.shares] == [
        ("1/4", "sealed"),
        ("2/4", "receiving"),
        ("3/4", "sealed"),
        ("4/4", "elsewhere"),
    ]
    assert "shares of step 15: 1/4 sealed, 2/4 receiving, 3/4 sealed, 4/4 elsewhere" in shown(found)
    assert found.document()["shares"][1] == {"attempt": 1, "step": 15, "share": "2/4", "state": "receiving"}


@pytest.mark.parametrize(("second", "newest"), [("receiving", None), ("staged", 15)])
def test_a_step_counts_as_staged_once_every_share_is(second: str, newest: int | None) -> None:
    lead = said("flusher", checkpoint(15, share="1/2"))
    other = ShareSnapshot(1, ring(in_ring(15, second)), said("flusher", checkpoint(15, share="2/2")))
    found = status(ring=ring(in_ring(15)), flusher_document=lead, others=(other,))
    level = found.levels.get("staged")
    assert (None if level is None else level.step) == newest


def test_on_the_machine_of_another_share_its_own_ring_is_its_own_share() -> None:
    own = said("flusher", checkpoint(15, share="2/2"))
    found = status(ring=ring(in_ring(15)), flusher_document=own)
    assert [(one.share, one.state) for one in found.shares] == [("1/2", "elsewhere"), ("2/2", "staged")]


@pytest.mark.parametrize("share", ["", "9", "2/1"])
def test_a_run_with_one_stager_has_no_shares(share: str) -> None:
    found = status(ring=ring(in_ring(15)), flusher_document=said("flusher", checkpoint(15, share=share)))
    assert found.shares == ()
    assert "shares" not in shown(found)
