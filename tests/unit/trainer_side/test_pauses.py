"""When the link's thread polls without a pause."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from holdfast.wire import Kind
from tests.unit.trainer_side.stager_port import LAYOUT, SECONDS_MAX, FakePort, make, offer, until
from trainer_side.transfer import TransferState


def test_it_polls_without_a_pause_only_while_mpi_takes_a_payload_to_pieces(
    port: FakePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.wire._PIECES_APART_MAX", 1)
    monkeypatch.setattr("trainer_side.outgoing._STALL_SECONDS", SECONDS_MAX)
    pauses: list[float] = []
    own_time = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("trainer_side.pauses.time", own_time)
    port.hold = True
    link = make(port, rank=1)
    link.announce(LAYOUT)
    transfer = offer(link)
    whole, scattered = (chunk for chunk, _ in LAYOUT.sends(1))
    assert [len(LAYOUT.pieces(chunk, 1)) for chunk in (whole, scattered)] == [1, 2]
    port.say(Kind.CREDIT, step=1, chunk=whole, arg=5)
    until(lambda: port.payloads)
    polls = port.polls
    until(lambda: port.polls > polls + 20)
    assert not pauses
    port.say(Kind.CREDIT, step=1, chunk=scattered, arg=6)
    until(lambda: pauses)
    assert set(pauses) == {0}
    port.hold = False
    assert transfer.released.wait(SECONDS_MAX)
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)


@pytest.mark.parametrize("why", ["another machine", "nothing moves"])
def test_it_polls_without_a_pause_where_the_stager_cannot_read_by_itself(
    port: FakePort, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    pauses: list[float] = []
    own_time = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("trainer_side.pauses.time", own_time)
    stall_seconds = 0.01 if why == "nothing moves" else SECONDS_MAX
    monkeypatch.setattr("trainer_side.outgoing._STALL_SECONDS", stall_seconds)
    port.hold = True
    port.one_machine = why != "another machine"
    link = make(port)
    link.announce(LAYOUT)
    transfer = offer(link)
    first = next(iter(LAYOUT.sends(0)))[0]
    port.say(Kind.CREDIT, step=1, chunk=first, arg=5)
    until(lambda: pauses)
    assert set(pauses) == {0}
    port.hold = False
    until(lambda: transfer.frames_left == len(list(LAYOUT.sends(0))) - 1)
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)
