"""A stager that cannot start tells every trainer why."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast.errors import FencedError
from holdfast.wire.frames import Kind
from holdfast.wire.welcome import Welcome
from stager.service import refuse_start
from tests.unit.stager.bench import FakePort


def test_a_refused_start_reaches_every_trainer() -> None:
    port = FakePort()
    for rank in range(2):
        port.say(rank, Kind.HELLO, attempt=0, body=b"{}")
        port.say(rank, Kind.BYE, attempt=0)
    assert refuse_start(cast("Any", port), FencedError("host a has the run"))
    for _, frame in port.told(Kind.WELCOME):
        with pytest.raises(FencedError, match="host a has the run"):
            Welcome.from_frame(frame)
    assert [rank for rank, _ in port.told(Kind.WELCOME)] == [0, 1]


def test_a_trainer_may_come_as_late_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads its model for minutes; and one that ends without ever having asked."""
    port = FakePort()
    turns = iter(range(5000))

    def pause(_seconds: float) -> None:
        turn = next(turns)
        monkeypatch.setattr("stager.service.time.monotonic", lambda: 60.0 * turn)
        if turn == 1000:
            port.say(0, Kind.HELLO, attempt=0, body=b"{}")
            port.say(0, Kind.BYE, attempt=0)
        if turn == 2000:
            port.say(1, Kind.BYE, attempt=0)

    monkeypatch.setattr("stager.service.time.sleep", pause)
    assert refuse_start(cast("Any", port), FencedError("host a has the run"))
    assert next(turns) > 2000
    assert [rank for rank, _ in port.told(Kind.WELCOME)] == [0]


def test_a_stager_that_is_told_to_stop_waits_for_no_trainer() -> None:
    assert not refuse_start(cast("Any", FakePort()), FencedError("host a has the run"), lambda: True)
