"""A process that declines a step states its cause, and every reader counts that cause."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import PeerLost
from holdfast.telemetry.causes import DeclineCause, Reason, cause_from


@pytest.mark.parametrize("cause", DeclineCause)
def test_a_rank_s_decline_comes_to_the_stager_with_its_cause(cause: DeclineCause) -> None:
    reason = cause.because("no memory: none")
    assert (reason.cause, str(reason)) == (cause, f"{cause}: no memory: none")
    assert Reason.from_decline(reason.text) == reason
    assert reason.with_rank(12) == Reason(cause, f"rank 12: {cause}: no memory: none")


@pytest.mark.parametrize("text", ["busy", "Anything else", "tape: full", "rank 1: busy: sending", ""])
def test_a_decline_that_states_no_known_cause_is_counted_as_another(text: str) -> None:
    assert Reason.from_decline(text) == Reason("other", text)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"cause": "busy", "reason": "rank 1: late: said otherwise"}, "busy"),
        ({"cause": "stager lost", "code": "peer_lost"}, "stager lost"),
        ({"reason": "steps 3, 4 are still being received", "code": "busy"}, "no room at the stager"),
        ({"message": "rank 1 is dead", "code": "peer_lost"}, "a process was lost or late"),
        ({"message": "something", "code": "fenced"}, "fenced"),
        ({"reason": "busy: of an old peer"}, "other"),
        ({"cause": None, "code": None}, "other"),
    ],
)
def test_the_cause_of_an_event_is_a_field_of_it(fields: dict[str, Any], cause: str) -> None:
    assert cause_from(fields) == cause


def test_an_error_is_counted_under_the_cause_of_its_code() -> None:
    error = PeerLost("rank 1 is dead")
    assert Reason.from_error(error) == Reason("a process was lost or late", "rank 1 is dead")
    assert Reason.from_body({"code": error.code, "message": str(error)}) == Reason.from_error(error)
    assert Reason.from_body({"reason": "rank 1: busy: sending", "cause": "busy"}) == Reason(
        "busy", "rank 1: busy: sending"
    )
