"""A rank's doubt is recorded for every attempt of its job, and sent to the flusher and all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.ring.doubts import DoubtedSteps, read_doubts
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Kind
from stager.doubt_handler import DoubtHandler


class Around:
    """Replaces the flusher's line and the ranks; records the messages to them."""

    def __init__(self, directory: Path) -> None:
        self.flusher = SimpleNamespace(attempt=5, ring=SimpleNamespace(directory=directory))
        self.to_flusher: list[str] = []
        self.to_ranks: list[wire.Frame] = []

    def send(self, what: str) -> None:
        self.to_flusher.append(what)

    def send_all(self, message: bytes) -> None:
        self.to_ranks.append(wire.decode(message))


def _handler(around: Any) -> DoubtHandler:
    return DoubtHandler(around, around, EventLog(None, role="stager"))


def test_a_doubt_holds_for_the_attempts_before_a_lost_stager_as_well(tmp_path: Path) -> None:
    around = Around(tmp_path)
    doubt = Doubt(1, (3, 9), "of the test", earlier_attempts=(2, 4))
    _handler(around).handle(1, wire.decode(doubt.to_frame(Kind.DOUBT, attempt=5)))
    plain = Doubt(1, (3, 9), "of the test")
    assert read_doubts(tmp_path) == [DoubtedSteps(attempt, plain) for attempt in (2, 4, 5)]
    assert around.to_flusher == ["doubt"]
    assert [(frame.kind, Doubt.from_frame(frame)) for frame in around.to_ranks] == [(Kind.DOUBTED, doubt)]


def test_a_doubt_in_the_name_of_another_rank_is_refused(tmp_path: Path) -> None:
    around = Around(tmp_path)
    with pytest.raises(ProtocolError, match="in the name of rank 1"):
        _handler(around).handle(0, wire.decode(Doubt(1, (3, 9), "").to_frame(Kind.DOUBT, attempt=5)))
    assert read_doubts(tmp_path) == []
    assert not around.to_ranks
