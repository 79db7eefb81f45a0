"""A doubt is input from another process: an invalid one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Kind


@pytest.mark.parametrize(
    "doubt",
    [Doubt(3, (5, 9), "why"), Doubt(0, None, ""), Doubt(1, (0, 0), "ä" * 300), Doubt(0, (1, 2), "", (3, 4))],
)
def test_a_doubt_comes_as_it_was_sent(doubt: Doubt) -> None:
    frame = wire.decode(doubt.to_frame(Kind.DOUBT, attempt=7))
    assert (frame.kind, frame.attempt) == (Kind.DOUBT, 7)
    assert Doubt.from_frame(frame) == doubt


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rank": 1, "steps": [], "reason": 3},
        {"rank": -1, "steps": [], "reason": ""},
        {"rank": True, "steps": [], "reason": ""},
        {"rank": 1, "steps": [4], "reason": ""},
        {"rank": 1, "steps": [4, 3], "reason": ""},
        {"rank": 1, "steps": [4, "5"], "reason": ""},
        {"rank": 1, "steps": [4, 2**62], "reason": ""},
        {"rank": 1, "steps": {"0": 1, "1": 2}, "reason": ""},
        {"rank": 1, "steps": [], "reason": "", "earlier_attempts": 3},
        {"rank": 1, "steps": [], "reason": "", "earlier_attempts": ["3"]},
        {"rank": 1, "steps": [], "reason": "", "earlier_attempts": [1] * 1001},
    ],
)
def test_an_inconsistent_doubt_is_refused(body: dict[str, Any]) -> None:
    message = wire.encode(Kind.DOUBT, body=wire.to_json(body))
    with pytest.raises(ProtocolError, match="DOUBT: expected"):
        Doubt.from_frame(wire.decode(message))


def test_a_long_reason_is_cut() -> None:
    frame = wire.decode(Doubt(0, (1, 2), "x" * 10_000).to_frame(Kind.DOUBTED, attempt=1))
    assert len(Doubt.from_frame(frame).reason) == 1000
