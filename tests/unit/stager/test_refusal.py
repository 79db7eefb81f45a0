"""A stager that cannot start tells every trainer why."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast.errors import FencedError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from stager.refusal import refuse_start
from tests.unit.stager.bench import FakePort


def test_a_refused_start_reaches_every_trainer() -> None:
    port = FakePort()
    for rank in range(2):
        port.say(rank, Kind.HELLO, attempt=0, body=b"{}")
        port.say(rank, Kind.BYE, attempt=0)
    refuse_start(cast("Any", port), FencedError("host a has the run"))
    for _, frame in port.told(Kind.WELCOME):
        with pytest.raises(FencedError, match="host a has the run"):
            wire.Welcome.from_frame(frame)
    assert [rank for rank, _ in port.told(Kind.WELCOME)] == [0, 1]
