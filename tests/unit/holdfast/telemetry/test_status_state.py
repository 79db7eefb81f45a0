"""The state that a process keeps about its own events: as much as a watcher can use."""

from __future__ import annotations

from typing import Any

from holdfast.telemetry.status_document import (
    CHECKPOINTS_MAX,
    LINES_MAX,
    RANKS_MAX,
    CheckpointStatus,
    FailuresStatus,
    RankStatus,
)
from holdfast.telemetry.status_state import StatusState


def durable(**fields: Any) -> dict[str, Any]:
    ranks = {
        "0": {"saved_at_unix": 990.0, "cst_seconds": 0.2},
        "1": {"saved_at_unix": 991.0, "cst_seconds": 0.5},
    }
    record = {"ranks": ranks, "stager": {"staged_at_unix": 993.0, "pgt1_seconds": 3.0}}
    return {"attempt": 1, "image_bytes": 100, "pgt2_seconds": 10.0, "record": record, **fields}


def newest(state: StatusState) -> CheckpointStatus:
    return state.build_document().checkpoints[-1]


def test_a_checkpoint_is_followed_from_the_flushers_events() -> None:
    state = StatusState("flusher", "r", clock=lambda: 1000.0)
    state.handle_event("flusher_ready", {"attempt": 1}, None)
    attached = {"attempt": 1, "pid": 5, "resumed": False, "failures": 2, "seen_seconds": 60.0}
    state.handle_event("stager_attached", attached, None)
    state.handle_event("flush_began", {"attempt": 1, "image_bytes": 100}, 7)
    state.handle_event("flush_held", {"attempt": 1, "code": "store", "message": "no room"}, 7)
    assert newest(state).held == "no room"
    state.handle_event("flush_resumed", {"attempt": 1, "seconds": 1.0, "failures": 1}, 7)
    state.handle_event("durable", durable(), 7)
    state.handle_event("verified", {"attempt": 1, "note": "", "seconds": 0.1}, 7)
    assert newest(state) == CheckpointStatus(
        attempt=1,
        step=7,
        image_bytes=100,
        saved_at_unix=990.0,
        staged_at_unix=993.0,
        durable_at_unix=1000.0,
        pgt1_seconds=3.0,
        pgt2_seconds=10.0,
        stall_seconds=0.5,
        read_back="verified",
        read_back_at_unix=1000.0,
    )
    said = state.build_document()
    assert said.stager_attached
    assert said.seen == FailuresStatus(failures=2, seconds=60.0)
    assert [(rank.rank, rank.stall_seconds) for rank in said.ranks] == [(1, 0.5), (0, 0.2)]
    assert [(line.event, line.text) for line in said.problems] == [
        ("flush_held", "store; no room"),
        ("flush_resumed", ""),
    ]


def test_the_shares_of_a_checkpoint_are_followed_from_seal_to_seal() -> None:
    lead, member = (StatusState("flusher", "r", clock=lambda: 1000.0) for _ in range(2))
    for state, share in ((lead, "1/2"), (member, "2/2")):
        state.handle_event("flush_began", {"attempt": 1, "image_bytes": 100, "share": share}, 7)
        state.handle_event("flush_held", {"attempt": 1, "message": "no room"}, 7)
        state.handle_event("share_sealed", {"attempt": 1, "share": share, "chunks": 3}, 7)
    assert (newest(lead).sealed, newest(member).sealed) == (("1/2",), ("2/2",))
    assert (newest(member).share, newest(member).held, newest(member).durable_at_unix) == ("2/2", "", None)
    lead.handle_event("seal_read", {"attempt": 1, "share": "2/2", "host": "kelp-2"}, 7)
    assert newest(lead).sealed == ("1/2", "2/2")
    member.handle_event("published", {"attempt": 1, "file": "step-000000007.pt"}, 7)
    assert newest(member).durable_at_unix == 1000.0


def test_steps_that_are_not_taken_are_counted_by_cause_and_the_last_are_kept() -> None:
    state = StatusState("stager", "r", ranks=list, clock=lambda: 1.0)
    state.handle_event("stager_ready", {"attempt": 3, "ranks": 2, "flusher_pid": 1}, None)
    for step in range(40):
        state.handle_event("declined", {"reason": f"rank 1: busy: step {step}", "cause": "busy"}, step)
    state.handle_event("failed", {"code": "peer_lost", "message": "rank 1 is dead"}, 50)
    said = state.build_document()
    assert said.not_taken == {"busy": 40, "a process was lost or late": 1}
    assert len(said.declined) == LINES_MAX
    assert said.declined[-1].text == "peer_lost; rank 1 is dead"
    assert (newest(state).attempt, newest(state).step, newest(state).failed) == (3, 50, "rank 1 is dead")


def test_the_transport_is_said_once_a_job_is_there() -> None:
    state = StatusState("stager", "r", ranks=list, clock=lambda: 1.0)
    assert state.build_document().transport is None
    state.handle_event("stager_ready", {"attempt": 3, "ranks": 2, "flusher_pid": 1, "transport": "tls"}, None)
    assert state.build_document().transport == "tls"


def test_the_interval_reason_is_that_of_the_last_change() -> None:
    state = StatusState("stager", "r", ranks=list, clock=lambda: 1.0)
    assert state.build_document().interval_why == ""
    change = {"at_step": 9, "first_step": 40, "every": 41, "every_before": None}
    state.handle_event("interval", {**change, "why": "every 41 steps: 0.9 % stall"}, None)
    state.handle_event("interval_kept", {"reason": "rank 1 did not answer", "every": 90}, None)
    assert state.build_document().interval_why == "every 41 steps: 0.9 % stall"
    state.handle_event("interval_loose", {"reason": "rank 1 is lost"}, None)
    assert state.build_document().interval_why == "powers of two, until the next change: rank 1 is lost"
    state.handle_event("interval", {**change, "why": "x" * 5000}, None)
    assert state.build_document().interval_why == "x" * 299 + "…"


def test_the_status_state_does_not_grow() -> None:
    state = StatusState("flusher", "r", clock=lambda: 1000.0)
    for step in range(500):
        state.handle_event("durable", durable(), step)
        state.handle_event("declined", {"reason": f"{step} {'x' * 5000}", "code": f"cause {step}"}, step)
        state.handle_event("rank_lost", {"lost_rank": step, "reason": "x" * 5000}, None)
        state.handle_event("notice", {"name": "x" * 5000, "kind": "terminate"}, None)
    said = state.build_document()
    assert [row.step for row in said.checkpoints] == list(range(500 - CHECKPOINTS_MAX, 500))
    assert len(said.problems) == len(said.notices) == LINES_MAX
    assert len(said.not_taken) < 32
    assert sum(said.not_taken.values()) == 500
    assert len(said.model_dump_json()) < 64 * 1024


def test_the_worst_of_many_ranks_are_said() -> None:
    ranks = [RankStatus(rank=rank, step=100, stall_seconds=0.1) for rank in range(1000)]
    ranks[700] = RankStatus(rank=700, state="silent", step=100)
    ranks[800] = RankStatus(rank=800, state="lost")
    ranks[900] = RankStatus(rank=900, step=60)
    ranks[950] = RankStatus(rank=950, step=100, stall_seconds=9.0)
    said = StatusState("stager", "r", ranks=lambda: ranks).build_document()
    assert said.ranks_total == 1000
    assert len(said.ranks) == RANKS_MAX
    assert [rank.rank for rank in said.ranks[:5]] == [800, 700, 900, 950, 0]


def test_a_record_from_outside_may_be_anything() -> None:
    state = StatusState("flusher", "r", clock=lambda: 1000.0)
    for record in (
        None,
        5,
        {"ranks": 5},
        {"ranks": {"x": {"cst_seconds": 1.0}, "1": 5, "2": {"cst_seconds": "long"}}},
    ):
        state.handle_event("durable", durable(record=record), 1)
    assert newest(state).stall_seconds is None
    assert newest(state).saved_at_unix == 990.0  # by PGT-2


def test_a_clock_that_is_far_off_costs_the_time_and_not_the_answer() -> None:
    state = StatusState("flusher", "r", clock=lambda: 1000.0)
    ranks = {"0": {"saved_at_unix": -5e300, "cst_seconds": 1e300}, "9" * 5000: {"cst_seconds": 1.0}}
    state.handle_event("durable", durable(record={"ranks": ranks, "stager": {"pgt1_seconds": -3.0}}), 7)
    assert newest(state) == CheckpointStatus(
        attempt=1, step=7, image_bytes=100, durable_at_unix=1000.0, pgt2_seconds=10.0
    )
