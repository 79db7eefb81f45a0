"""Facts about a run from its logs: attempts, losses, goodput, checkpoints, and unknowns."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.telemetry.event_reading import parse_line, read_logs
from holdfast.telemetry.rows import StoredCheckpoint
from operator_side.report.facts import ring_bytes
from operator_side.report.goodput import PARTS
from operator_side.report.sentences import find_hints, summarize_run
from tests.unit.operator_side.page.reading import Page
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


def supervised(*, resumed_step: int = 10) -> list[Line]:
    """A run that starts for 100 s, trains 200 s, is lost, and 60 s later trains 140 s. Step 10 was saved at 200."""
    return [
        (0.0, "supervisor", "launched", {"attempt": 1, "ranks": 2, "hosts": ["a:2"], "newest_step": -1}),
        (50.0, "stager", "stager_ready", {"attempt": 4, "ranks": 2}),
        (90.0, "supervisor", "restored", {"attempt": 1, "step": -1}),
        (100.0, "supervisor", "training", {"attempt": 1, "step": 0, "seconds": 100.0}),
        *checkpoint(5, 150.0, attempt=4),
        *checkpoint(10, 200.0, attempt=4),
        (
            300.0,
            "supervisor",
            "lost",
            {"attempt": 1, "rank": 1, "status": -9, "message": "attempt 1: rank 1 ended"},
        ),
        (
            310.0,
            "supervisor",
            "ended",
            {
                "attempt": 1,
                "cause": "killed",
                "exit_code": 137,
                "message": "attempt 1: rank 1 was killed by SIGKILL",
            },
        ),
        (311.0, "supervisor", "launched", {"attempt": 2, "ranks": 2, "hosts": None, "newest_step": 10}),
        (330.0, "stager", "stager_ready", {"attempt": 5, "ranks": 2}),
        (355.0, "supervisor", "restored", {"attempt": 2, "step": resumed_step}),
        (
            360.0,
            "supervisor",
            "training",
            {
                "attempt": 2,
                "step": 11,
                "seconds": 60.0,
                "ended_seconds": 10.0,
                "launched_seconds": 1.0,
                "joined_seconds": 19.0,
                "restored_seconds": 25.0,
                "training_seconds": 5.0,
            },
        ),
        *checkpoint(15, 400.0, attempt=5),
        (
            500.0,
            "supervisor",
            "ended",
            {"attempt": 2, "cause": "done", "exit_code": 0, "message": "attempt 2: well"},
        ),
        (
            500.0,
            "supervisor",
            "over",
            {"cause": "done", "exit_code": 0, "message": "every rank has ended well"},
        ),
    ]


def test_the_time_of_a_run_adds_up(tmp_path: Path) -> None:
    facts = facts_of(written(tmp_path / "log", supervised()), price=3600.0)
    (loss,) = facts.interruptions
    assert loss.attempt.cause == "killed"
    assert loss.recovery is not None
    assert loss.recovery.phases == {
        "ended": 10.0,
        "launched": 1.0,
        "joined": 19.0,
        "restored": 25.0,
        "training": 5.0,
    }
    assert loss.down_seconds == pytest.approx(60.0)
    assert loss.lost is not None
    assert loss.lost.seconds == pytest.approx(100.0), "all since step 10 was saved, at 200"
    assert loss.lost.since_step == 10
    assert loss.lost.steps == 10, "saves were 5 steps and 50 s apart"
    assert loss.dollars == pytest.approx(160.0), "a dollar a second"
    goodput = facts.goodput
    assert goodput is not None
    assert not goodput.is_estimate
    assert goodput.parts.keys() == PARTS.keys()
    assert sum(goodput.parts.values()) == pytest.approx(goodput.total_seconds) == pytest.approx(500.0)
    assert goodput.parts["starting"] == pytest.approx(100.0)
    assert goodput.parts["work done twice"] == pytest.approx(100.0)
    assert goodput.parts["getting back after losses"] == pytest.approx(60.0)
    assert goodput.parts["stalls for checkpoints"] == pytest.approx(0.2), (
        "the one of step 10 was in work that was lost"
    )
    assert goodput.share == pytest.approx(239.8 / 500)


def test_the_stagers_earlier_word_decides_how_many_steps_were_lost(tmp_path: Path) -> None:
    """A rank dies with its wrapper: no process tells the supervisor, which judges only when mpirun has ended."""
    lines = [line for line in supervised() if line[2] != "lost"]
    lines.insert(7, (300.0, "stager", "rank_lost", {"lost_rank": 1, "reason": "rank 1 is dead"}))
    (loss,) = facts_of(written(tmp_path / "log", lines)).interruptions
    assert loss.attempt.stopped_at_unix == T0 + 300.0
    assert loss.lost is not None
    assert loss.lost.steps == 10


def test_a_job_lost_after_its_only_save_lost_steps_of_the_other_jobs_pace(tmp_path: Path) -> None:
    lines = [line for line in supervised() if not (line[3].get("step") == 5 and line[1] != "supervisor")]
    alone = facts_of(written(tmp_path / "alone", lines)).interruptions[0].lost
    assert alone is not None
    assert alone.steps is None, "no two saves of one job tell a pace"
    assert alone.seconds == pytest.approx(100.0)
    lines[-2:-2] = checkpoint(20, 450.0, attempt=5)
    told = facts_of(written(tmp_path / "told", lines)).interruptions[0].lost
    assert told is not None
    assert told.steps == 10, "attempt 2 saved 5 steps and 50 s apart"


def test_going_on_from_an_older_step_loses_more(tmp_path: Path) -> None:
    facts = facts_of(written(tmp_path / "log", supervised(resumed_step=5)))
    assert facts.interruptions[0].lost is not None
    assert facts.interruptions[0].lost.seconds == pytest.approx(150.0)
    lines = [line for line in supervised() if line[2] != "over" and line[3].get("cause") != "done"]
    lines += [
        (450.0, "supervisor", "ended", {"attempt": 2, "cause": "lost", "message": "attempt 2: silent"}),
        (460.0, "supervisor", "launched", {"attempt": 3, "ranks": 2}),
        (470.0, "supervisor", "restored", {"attempt": 3, "step": 5}),
        (480.0, "supervisor", "training", {"attempt": 3, "step": 6, "seconds": 30.0}),
        (600.0, "supervisor", "ended", {"attempt": 3, "cause": "done"}),
    ]
    again = facts_of(written(tmp_path / "again", lines))
    first, second = again.interruptions
    assert first.lost is not None
    assert second.lost is not None
    assert first.lost.seconds == pytest.approx(100.0)
    assert second.lost.seconds == pytest.approx(90.0 + 50.0), (
        "all of attempt 2, and of attempt 1 from 150 to 200"
    )
    assert again.goodput is not None
    assert sum(again.goodput.parts.values()) == pytest.approx(600.0)


def test_an_unknown_loss_is_said(tmp_path: Path) -> None:
    facts = facts_of(written(tmp_path / "log", supervised(resumed_step=7)))
    assert facts.interruptions[0].lost is None
    assert facts.goodput is not None
    assert facts.goodput.is_estimate
    assert any("upper bound" in text for text in facts.unknown)


def test_a_start_that_fails_belongs_to_the_loss_before(tmp_path: Path) -> None:
    lines = supervised()
    failed: list[Line] = [
        (311.0, "supervisor", "launched", {"attempt": 2, "ranks": 2}),
        (320.0, "supervisor", "ended", {"attempt": 2, "cause": "preempted", "message": "attempt 2: gone"}),
    ]
    later = [(at + 20, role, event, fields) for at, role, event, fields in lines if at >= 311.0]
    lines = [line for line in lines if line[0] < 311.0] + failed + later
    facts = facts_of(written(tmp_path / "log", lines))
    (loss,) = facts.interruptions
    assert loss.down_seconds == pytest.approx(80.0)
    assert facts.goodput is not None
    assert facts.goodput.parts["starting"] == pytest.approx(100.0), "the failed start is part of the way back"
    assert sum(facts.goodput.parts.values()) == pytest.approx(520.0)


def test_a_stop_and_a_new_launch_is_no_interruption(tmp_path: Path) -> None:
    lines: list[Line] = [
        (0.0, "supervisor", "launched", {"attempt": 1, "ranks": 1}),
        (10.0, "supervisor", "training", {"attempt": 1, "step": 0}),
        (110.0, "supervisor", "ended", {"attempt": 1, "cause": "stopped"}),
        (110.0, "supervisor", "over", {"cause": "stopped", "message": "was told to stop"}),
        (1110.0, "supervisor", "launched", {"attempt": 2, "ranks": 1}),
        (1120.0, "supervisor", "training", {"attempt": 2, "step": 5}),
        (1220.0, "supervisor", "ended", {"attempt": 2, "cause": "done"}),
    ]
    facts = facts_of(written(tmp_path / "log", lines))
    assert not facts.interruptions
    assert facts.goodput is not None
    assert facts.goodput.parts["between runs"] == pytest.approx(1000.0)
    assert facts.goodput.share == pytest.approx(200 / 220), "nobody wanted it to run in between"


def test_a_real_drilled_run() -> None:
    facts = facts_of(STATUS, EVENTS, price=12.4)
    assert [one.cause for one in facts.attempts] == ["preempted", "killed", "preempted", "done"]
    assert [round(one.down_seconds, 1) for one in facts.interruptions] == [16.7, 20.5, 22.6]
    assert [one.lost is None for one in facts.interruptions] == [False, False, True], (
        "step 73 is in none of these"
    )
    assert [(row.attempt, row.step, row.state) for row in facts.rows] == [
        (1, 4, "verified"),
        (1, 19, "verified"),
        (2, 24, "verified"),
        (2, 64, "verified"),
    ]
    first = facts.rows[0]
    assert first.stalls == {0: 0.1678, 1: 0.1902}
    assert first.ranks[1].host == "vm"
    assert first.pgt2_seconds == pytest.approx(0.6697)
    said = " ".join(summarize_run(facts))
    assert "It ended well" in said
    assert "interrupted 3 times: at 2026-11-22 13:42:14 UTC (preempted: host vm had a notice" in said
    assert "newest good one is step 64 (attempt 2), read back and found good" in said
    assert re.search(r"About \d+ % of the time went into work that was kept", said), (
        "a loss is not fully known"
    )
    assert "$12.40 an hour" in said
    advice = [one.text for one in find_hints(facts)]
    assert any(
        "attempt 3 cost the most" in text and "until its processes had joined" in text for text in advice
    )
    assert [one.event for one in facts.incidents][:2] == ["notice", "emergency"]


def test_without_a_supervisor_less_is_known_and_said() -> None:
    facts = facts_of(EVENTS)
    assert [one.is_supervised for one in facts.attempts] == [False, False]
    assert facts.attempts[0].cause == "lost", "the stager told of a lost rank"
    assert facts.goodput is not None
    assert facts.goodput.is_estimate
    assert any("status.jsonl" in text for text in facts.unknown)


def test_an_empty_run_is_told_to_be_one(tmp_path: Path) -> None:
    facts = facts_of(written(tmp_path / "log", []))
    assert summarize_run(facts)[0].startswith("Nothing is known of this run")
    assert facts.goodput is None
    assert not find_hints(facts)


def test_a_log_that_ends_in_the_middle_of_a_line(tmp_path: Path) -> None:
    whole = EVENTS.read_bytes()
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(whole[:-40])
    log = read_logs([torn])
    assert log.unreadable == 1
    assert log.unfinished == [str(torn)]
    assert len(log.events) == len(read_logs([EVENTS]).events) - 1
    facts = facts_of(torn)
    assert any("is incomplete" in text for text in facts.unknown)
    assert any("1 lines of the logs are not events" in text for text in facts.unknown)


def test_every_cut_of_a_log_is_read(tmp_path: Path) -> None:
    whole = STATUS.read_bytes() + EVENTS.read_bytes()
    path = tmp_path / "cut.jsonl"
    for size in range(0, len(whole), 397):
        path.write_bytes(whole[:size])
        facts = facts_of(path)
        assert summarize_run(facts)


def test_a_directory_of_holdfast_run_is_both_its_logs(tmp_path: Path) -> None:
    (tmp_path / "status.jsonl").write_bytes(STATUS.read_bytes())
    (tmp_path / "events.jsonl").write_bytes(EVENTS.read_bytes())
    assert len(read_logs([tmp_path]).events) == len(read_logs([STATUS, EVENTS]).events)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"neither status\.jsonl nor events\.jsonl"):
        read_logs([empty])
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_logs([tmp_path / "none"])


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{",
        b'{"time":1}',
        b'{"time":true,"event":"x"}',
        b'{"time":NaN,"event":"x"}',
        b'{"time":1e300,"event":"x"}',
        b'{"time":1,"event":{}}',
        b'{"time":' + b"9" * 5000 + b',"event":"x"}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_event_is_skipped(line: bytes) -> None:
    assert parse_line(line) is None


def test_steps_that_are_declined_by_all_ranks_are_one(tmp_path: Path) -> None:
    lines: list[Line] = [(0.0, "stager", "stager_ready", {"attempt": 1, "ranks": 2})]
    for rank in (0, 1):
        said = {"rank": rank, "step": 3, "reason": "busy: 1 in flight", "cause": "busy"}
        lines.append((1.0 + rank, "trainer", "declined", said))
    lines += checkpoint(3, 5.0, attempt=2)  # the next attempt saves the same step
    lines.insert(3, (4.0, "stager", "stager_ready", {"attempt": 2, "ranks": 2}))
    facts = facts_of(written(tmp_path / "log", lines))
    (one,) = facts.checkpoints.skipped
    assert (one.attempt, one.step, one.kind, one.cause, one.ranks) == (1, 3, "declined", "busy", 2)
    assert [(row.attempt, row.step, row.state) for row in facts.rows] == [(2, 3, "verified")]
    assert any("50 % of the checkpoints" in advice.text for advice in find_hints(facts))


def stored(step: int, *, state: str = "verified", note: str = "") -> StoredCheckpoint:
    ranks = {"0": {"saved_at_unix": T0 + step, "cst_seconds": 0.5, "save_seconds": 0.5, "host": "a"}}
    times = (T0 + step + 2, T0 + step, 1.0, 2.0)
    return StoredCheckpoint(1, step, state, 1 << 20, *times, {"ranks": ranks}, note)  # type: ignore[arg-type]


def test_manifests_alone_tell_of_checkpoints(tmp_path: Path) -> None:
    facts = facts_of(stored=[stored(20, state="bad", note="chunk 3 differs"), stored(10)])
    assert [(row.step, row.state, row.in_store) for row in facts.rows] == [
        (10, "verified", True),
        (20, "bad", True),
    ]
    assert facts.rows[0].stall_seconds == 0.5
    said = " ".join(summarize_run(facts))
    assert "newest good one is step 10" in said
    assert "it does not say when the run trained and when it was idle" in said
    assert find_hints(facts)[0].text.startswith(
        "Step 20 (attempt 1) was read back and is bad: chunk 3 differs"
    )
    assert any("No event log was given" in text for text in facts.unknown)


def test_logs_of_ranks_alone_go_with_the_manifest_of_their_step(tmp_path: Path) -> None:
    lines = [line for line in checkpoint(10, 10.0) if line[1] == "trainer"]
    one = stored(10)
    facts = facts_of(written(tmp_path / "log", lines), stored=[dataclasses.replace(one, attempt=7)])
    assert [(row.attempt, row.step, sorted(row.ranks)) for row in facts.rows] == [(7, 10, [0, 1])]


@pytest.mark.parametrize("odd", [-7e10, 1e300, float("-inf")])
def test_a_manifest_whose_times_are_none(odd: float) -> None:
    one = StoredCheckpoint(1, 3, "durable", 1 << 20, odd, odd, 1e308, 1e-320, {})
    facts = facts_of(stored=[one])
    assert facts.rows[0].saved_at_unix is None
    assert "Step" not in Page(page_of(facts)).text
    assert summarize_run(facts)


def test_ring_bytes_follow_checkpoints_in_flight(tmp_path: Path) -> None:
    lines = [*checkpoint(1, 0.0), *checkpoint(2, 1.0)]
    facts = facts_of(written(tmp_path / "log", sorted(lines, key=lambda line: line[0])))
    held = [(round(at - T0, 1), nbytes >> 20) for at, nbytes in ring_bytes(facts.rows, T0 + 9)]
    assert held == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 0)]


def test_a_log_of_a_version_that_stated_no_cause_is_counted_by_its_sentence(tmp_path: Path) -> None:
    lines: list[Line] = [
        (0.0, "stager", "stager_ready", {"attempt": 1, "ranks": 2}),
        (1.0, "stager", "declined", {"step": 1, "reason": "rank 1: busy: still being sent"}),
        (2.0, "stager", "declined", {"step": 2, "reason": "steps 0, 1 are being received", "code": "busy"}),
        (3.0, "stager", "failed", {"step": 3, "message": "rank 1 is dead", "code": "peer_lost"}),
        (4.0, "trainer", "declined", {"rank": 0, "step": 4, "reason": "Nobody knows"}),
        (5.0, "stager", "declined", {"step": 5, "reason": "rank 1: late: said", "cause": "other"}),
    ]
    found = facts_of(written(tmp_path / "log", lines)).checkpoints.skipped
    assert [(one.step, one.cause) for one in found] == [
        (1, "busy"),
        (2, "no room at the stager"),
        (3, "a process was lost or late"),
        (4, "other"),
        (5, "other"),
    ]


def test_the_share_that_is_written_last_is_told(tmp_path: Path) -> None:
    lines: list[Line] = []
    for step in (10, 20, 30):
        said = {share: {"attempt": 1, "step": step, "share": share} for share in ("1/3", "2/3", "3/3")}
        lines += [
            *checkpoint(step, 10.0 * step),
            (10.0 * step + 1, "flusher", "share_sealed", said["1/3"]),
            (10.0 * step + 1, "flusher", "share_sealed", said["2/3"]),
            (10.0 * step + 2, "flusher", "seal_read", {**said["3/3"], "host": "kelp-3"}),
            (10.0 * step + 3, "flusher", "seal_read", {**said["2/3"], "host": "kelp-2"}),
        ]
    told = summarize_run(facts_of(written(tmp_path / "log", lines)))
    (line,) = [line for line in told if "several stagers" in line]
    assert line.startswith(
        "Among 3 checkpoints of several stagers, share 3/3 was the last to be written of 3; "
    )
    assert line.endswith("the last share came 1.00 s after the first at the median.")
    alone = facts_of(written(tmp_path / "one", checkpoint(10, 100.0)))
    assert not any("several stagers" in line for line in summarize_run(alone))


def test_a_checkpoint_that_was_set_aside_is_told(tmp_path: Path) -> None:
    message = "step 10 (attempt 4) is set aside: 2 attempts …; the next goes back to step 5"
    line: Line = (
        310.5,
        "supervisor",
        "set_aside",
        {"attempt": 1, "step": 10, "of_attempt": 4, "message": message},
    )
    facts = facts_of(written(tmp_path / "log", [*supervised(resumed_step=5), line]))
    assert f"S{message[1:]}." in summarize_run(facts)
    assert [(one.event, one.step, one.is_notice) for one in facts.incidents] == [("set_aside", 10, False)]


def test_without_the_ranks_logs_the_stager_tells_when_training_began_and_from_where(tmp_path: Path) -> None:
    """Under torchrun ranks log on their own machines, and there is no supervisor."""
    lines: list[Line] = [
        (0.0, "stager", "stager_ready", {"attempt": 1, "ranks": 2}),
        *checkpoint(5, 10.0),
        *checkpoint(10, 20.0),
        (40.0, "stager", "rank_lost", {"lost_rank": 1, "reason": "rank 1 is dead"}),
        (40.0, "stager", "stager_ended", {}),
        (50.0, "stager", "stager_ready", {"attempt": 2, "ranks": 2}),
        (
            51.0,
            "stager",
            "resume_proof",
            {"step": 10, "attempt": 1, "verdict": "not proven", "text": "not proven"},
        ),
        *checkpoint(15, 60.0, attempt=2),
        (90.0, "stager", "stager_ended", {}),
    ]
    facts = facts_of(written(tmp_path / "log", [line for line in lines if line[1] != "trainer"]))
    first, second = facts.attempts
    assert (first.training_at_unix, second.training_at_unix) == (T0 + 10, T0 + 60)
    assert (second.restored_attempt, second.restored_step) == (1, 10)
    (loss,) = facts.interruptions
    assert loss.lost is not None
    assert (loss.down_seconds, loss.lost.seconds, loss.lost.steps) == (20.0, 20.0, 10)
    assert facts.goodput is not None
    assert facts.goodput.is_estimate
    assert facts.goodput.parts["starting"] == 10.0


def test_the_restored_one_of_two_checkpoints_of_a_step_counts(tmp_path: Path) -> None:
    """After a return to an older step the same step numbers appear again; no rank's log is on this machine."""
    told: list[Line] = []
    for at, role, event, fields in supervised():
        is_it = event == "restored" and fields["step"] == 10
        told.append((at, role, event, {**fields, "of_attempt": 4} if is_it else fields))
    (back,) = [one for one in facts_of(written(tmp_path / "log", told)).attempts if one.restored_step == 10]
    assert back.restored_attempt == 4


def test_a_checkpoint_of_several_stagers_is_staged_once_all_shares_are(tmp_path: Path) -> None:
    lines: list[Line] = [(50.0, "stager", "stager_ready", {"attempt": 4, "ranks": 2})]
    fields = {"step": 5, "image_bytes": 1 << 20, "pgt1_seconds": 1.0}
    lines.append((60.0, "stager", "staged", {**fields, "share": "1/2"}))
    (row,) = facts_of(written(tmp_path / "one", lines)).checkpoints.rows
    assert (row.state, row.staged_at_unix) == ("saving", None)
    lines.append((62.0, "stager", "staged", {**fields, "share": "2/2", "pgt1_seconds": 3.0}))
    (row,) = facts_of(written(tmp_path / "both", lines)).checkpoints.rows
    assert (row.state, row.staged_at_unix, row.pgt1_seconds) == ("staged", T0 + 62.0, 3.0)
