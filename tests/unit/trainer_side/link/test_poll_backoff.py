"""When the link's thread polls without a pause."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from holdfast.wire.frames import Kind
from tests.unit.trainer_side.stager_port import LAYOUT, SECONDS_MAX, FakePort, make, offer, until
from trainer_side.link.outbox import Outbox
from trainer_side.link.poll_backoff import PollBackoff
from trainer_side.transfer import TransferState


def test_the_link_polls_without_a_pause_while_mpi_sends_a_payload_in_pieces(
    port: FakePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.wire.frames._PIECES_APART_MAX", 1)
    monkeypatch.setattr("trainer_side.link.outgoing._STALL_SECONDS", SECONDS_MAX)
    pauses: list[float] = []
    own_time = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("trainer_side.link.poll_backoff.time", own_time)
    port.hold = True
    link = make(port, rank=1)
    transfer = offer(link)
    whole, scattered = (chunk for chunk, _ in LAYOUT.sent_frames(1))
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
def test_the_link_polls_without_a_pause_where_the_stager_cannot_read_by_itself(
    port: FakePort, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    pauses: list[float] = []
    own_time = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("trainer_side.link.poll_backoff.time", own_time)
    stall_seconds = 0.01 if why == "nothing moves" else SECONDS_MAX
    monkeypatch.setattr("trainer_side.link.outgoing._STALL_SECONDS", stall_seconds)
    port.hold = True
    port.one_machine = why != "another machine"
    link = make(port)
    transfer = offer(link)
    first = next(iter(LAYOUT.sent_frames(0)))[0]
    port.say(Kind.CREDIT, step=1, chunk=first, arg=5)
    until(lambda: pauses)
    assert set(pauses) == {0}
    port.hold = False
    until(lambda: transfer.frames_left == len(list(LAYOUT.sent_frames(0))) - 1)
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)


class _Waits:
    """Stands for the event that the thread waits on, and the outbox that says what is under way."""

    def __init__(self, *, streaming: bool) -> None:
        self.is_streaming, self.all_staged = streaming, False
        self.seconds: list[float] = []

    def __bool__(self) -> bool:
        return True

    def check_stall(self, _now: float) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def clear(self) -> None:
        pass


@pytest.mark.parametrize(
    ("processes_per_core", "longest_seconds"),
    [(0.0, 0.5e-3), (1.5, 0.5e-3), (2.0, 0.5e-3), (16.0, 4e-3), (200.0, 20e-3)],
)
def test_where_ranks_crowd_on_the_cores_they_look_less_often(
    monkeypatch: pytest.MonkeyPatch, processes_per_core: float, longest_seconds: float
) -> None:
    waits = _Waits(streaming=False)
    pauses = PollBackoff(cast(Outbox, waits), lambda: 0.0, processes_per_core)
    monkeypatch.setattr(pauses, "_wake", waits)
    for _ in range(40):
        pauses.pause(is_fetching=False)
    assert waits.seconds[0] == pytest.approx(0.2e-3), "after something has happened it is as quick as ever"
    assert max(waits.seconds) == pytest.approx(longest_seconds)


@pytest.mark.parametrize(
    ("streaming", "waited_seconds", "longest_seconds"),
    [
        (False, 0.01, 0.5e-3),
        (False, 0.1, 2e-3),
        (False, 0.5, 10e-3),
        (False, 60.0, 20e-3),
        (True, 60.0, 0.5e-3),
    ],
)
def test_after_a_long_wait_it_looks_less_often_unless_bytes_move_only_while_it_looks(
    monkeypatch: pytest.MonkeyPatch, *, streaming: bool, waited_seconds: float, longest_seconds: float
) -> None:
    waits, now = _Waits(streaming=streaming), [0.0]
    pauses = PollBackoff(cast(Outbox, waits), lambda: now[0], 1.0)
    monkeypatch.setattr(pauses, "_wake", waits)
    now[0] = waited_seconds
    for _ in range(40):
        pauses.pause(is_fetching=False)
    assert max(waits.seconds) == pytest.approx(longest_seconds)


def test_once_something_has_happened_it_looks_as_often_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, now = _Waits(streaming=False), [0.0]
    pauses = PollBackoff(cast(Outbox, waits), lambda: now[0], 1.0)
    monkeypatch.setattr(pauses, "_wake", waits)
    now[0] = 60.0
    for _ in range(40):
        pauses.pause(is_fetching=False)
    pauses.reset()
    waits.seconds.clear()
    for _ in range(40):
        pauses.pause(is_fetching=False)
    assert waits.seconds[0] == pytest.approx(0.2e-3)
    assert max(waits.seconds) == pytest.approx(0.5e-3)


@pytest.mark.parametrize(("processes_per_core", "pause_seconds"), [(1.5, 0), (16.0, 0.2e-3)])
def test_where_they_crowd_none_keeps_a_core_to_itself(
    monkeypatch: pytest.MonkeyPatch, processes_per_core: float, pause_seconds: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("trainer_side.link.poll_backoff.time", SimpleNamespace(sleep=slept.append))
    PollBackoff(cast(Outbox, _Waits(streaming=True)), lambda: 0.0, processes_per_core).pause(
        is_fetching=False
    )
    assert slept == [pause_seconds]
