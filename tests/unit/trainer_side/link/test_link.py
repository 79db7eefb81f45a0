"""The link against a simulated stager: its messages, its losses, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from holdfast.errors import HoldfastError, PeerLost
from holdfast.notices.notice import Notice, NoticeKind, SaveInstruction
from holdfast.telemetry.causes import DeclineCause
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Kind
from holdfast.wire.pace import PaceRequest
from holdfast.wire.state_messages import Proposal
from holdfast.wire.welcome import Welcome
from tests.unit.trainer_side.stager_port import (
    CHUNK,
    LAYOUT,
    SECONDS_MAX,
    FakePort,
    agreed_steps,
    make,
    offer,
    schedule,
    until,
)
from trainer_side.link import rejoining
from trainer_side.link.link import Link
from trainer_side.link.rejoining import Reconnect
from trainer_side.link.stager_message import StagerMessage
from trainer_side.pace.schedule import SchedulePhase
from trainer_side.transfer import TransferState


def test_a_beat_is_answered(link: Link, port: FakePort) -> None:
    port.say(Kind.BEAT)
    until(lambda: port.of(Kind.BEAT))
    assert len(port.of(Kind.BEAT)) == 1


def test_only_rank_0_sends_the_layout(port: FakePort) -> None:
    link = make(port, rank=1)
    offer(link)
    until(lambda: port.of(Kind.OFFER))
    assert not port.of(Kind.LAYOUT)
    link.close(seconds_max=0.0)


def test_an_outgrown_pickle_says_what_it_needs(link: Link, port: FakePort) -> None:
    link.decline(3, DeclineCause.OUTGROWN.because("of the test"), needed_pickle_bytes=99)
    until(lambda: port.of(Kind.DECLINE))
    assert (port.of(Kind.DECLINE)[0].step, port.of(Kind.DECLINE)[0].arg) == (3, 99)


@pytest.mark.parametrize("again", [1, 0])
def test_a_step_that_is_not_new_is_declined_here(link: Link, port: FakePort, again: int) -> None:
    offer(link)
    transfer = offer(link, again)
    assert transfer.released.is_set()
    assert "not above step 1" in str(transfer.reason)
    until(lambda: port.of(Kind.OFFER))
    assert len(port.of(Kind.OFFER)) == 1


def _kill(port: FakePort) -> None:
    port.dead = True


@pytest.mark.parametrize(
    "break_it",
    [
        _kill,
        lambda port: port.say(Kind.HELLO),
        lambda port: port.inbox.append(b"x" * 50),
        lambda port: port.say(Kind.REFUSED, body={"code": "protocol", "message": "you broke it"}),
    ],
    ids=["dead", "wrong kind", "noise", "dropped"],
)
def test_a_lost_stager_ends_every_wait_and_is_said_once(
    link: Link, port: FakePort, caplog: pytest.LogCaptureFixture, break_it: Callable[[FakePort], None]
) -> None:
    port.hold = True
    transfer = offer(link)
    port.say(Kind.CREDIT, step=1, chunk=0, arg=1)
    until(lambda: port.payloads)
    break_it(port)
    assert transfer.settled.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.FAILED
    assert isinstance(link.job.problem, HoldfastError)
    later = offer(link, 2)
    assert (later.state, later.released.is_set()) == (TransferState.DECLINED, True)
    with pytest.raises(type(link.job.problem)):
        link.agree(Proposal("d", [], 1, {}))
    assert len([r for r in caplog.records if "no more checkpoints are taken" in r.getMessage()]) == 1
    link.close(seconds_max=SECONDS_MAX)
    assert port.left


def test_a_rank_that_missed_a_save_of_the_others_keeps_its_stager(
    link: Link, port: FakePort, caplog: pytest.LogCaptureFixture
) -> None:
    port.say(Kind.REFUSED, body={"code": "peer_lost", "message": "the stager waited 60 s for rank 0"})
    until(lambda: "did not join a save() started by other ranks: the stager waited 60 s" in caplog.text)
    assert link.job.problem is None
    offer(link)
    until(lambda: port.of(Kind.OFFER))


def test_a_silent_stager_is_lost_after_its_deadline_and_not_before(port: FakePort) -> None:
    now = [0.0]
    link = make(port, stager_seconds_max=30, clock=lambda: now[0])

    def pass_seconds(seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            now[0] += 0.5
            turned = link._session.silence.checked_at
            until(lambda: link._session.silence.checked_at > turned or link.job.problem)  # noqa: B023 (called at once)

    def problem() -> HoldfastError | None:
        return link.job.problem

    pass_seconds(29)
    assert problem() is None
    port.say(Kind.BEAT)
    until(lambda: link._session.silence.seconds == 0)
    now[0] += 1000.0  # this process was stopped: it has not listened
    until(lambda: link._session.silence.checked_at == now[0])
    assert problem() is None
    pass_seconds(30)
    until(problem)
    assert isinstance(problem(), PeerLost)
    assert "heard nothing from the stager for 30 s" in str(problem())
    link.close(seconds_max=0.0)


def test_close_waits_for_durable(link: Link, port: FakePort) -> None:
    transfer = offer(link)
    for chunk, _ in LAYOUT.sent_frames(0):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=chunk)
    port.say(Kind.STAGED, step=1)
    assert transfer.settled.wait(SECONDS_MAX)
    threading.Timer(0.1, lambda: port.say(Kind.DURABLE, step=1)).start()
    link.close(seconds_max=SECONDS_MAX)
    assert transfer.state is TransferState.DURABLE
    assert port.left
    link.close(seconds_max=SECONDS_MAX)


def test_close_ends_at_its_deadline_and_says_so(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    transfer = offer(link)
    link.close(seconds_max=0.01)
    assert transfer.released.is_set()
    assert transfer.state is TransferState.FAILED
    assert any("for step 1, which is" in record.getMessage() for record in caplog.records)


def test_the_thread_ends_with_the_link(port: FakePort) -> None:
    link = make(port)
    link.close(seconds_max=0.0)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "holdfast-link"])


def test_each_beat_is_answered(link: Link, port: FakePort) -> None:
    for _ in range(3):
        port.say(Kind.BEAT)
    until(lambda: len(port.of(Kind.BEAT)) == 3)
    assert all(frame.attempt == 1 for frame in port.of(Kind.BEAT))
    assert Kind.BEAT.to_stager


def test_a_proposed_step_is_answered_with_where_training_is(link: Link, port: FakePort) -> None:
    link.send_message(StagerMessage.notice(Notice(NoticeKind.TERMINATE, time.time() + 60, "aws")))
    until(lambda: port.of(Kind.NOTICE))
    assert wire.json_body(port.of(Kind.NOTICE)[0])["source"] == "aws"
    agreed_steps(link).on_restored(6)
    port.say(Kind.SAVE_AT, step=9, arg=1)
    until(lambda: port.of(Kind.AT))
    (answer,) = port.of(Kind.AT)
    assert (answer.step, answer.arg, answer.body) == (7, 1, b"{}")
    assert agreed_steps(link).reach(8) is None
    reached: list[SaveInstruction | None] = []
    waiting = threading.Thread(target=lambda: reached.append(agreed_steps(link).reach(9)))
    waiting.start()
    terms = SaveInstruction(
        True, "there is time", Notice(NoticeKind.TERMINATE, time.time() + 60, "aws", rank=1)
    )
    message = wire.encode(Kind.SAVE_AT, attempt=1, step=9, flags=1, arg=1, body=wire.to_json(terms.to_json()))
    assert waiting.is_alive()
    with port.lock:
        port.inbox.append(message)
    waiting.join(SECONDS_MAX)
    (found,) = reached
    assert found is not None
    assert found.save
    notice = agreed_steps(link).notice
    assert notice is not None
    assert notice.rank == 1


@pytest.mark.parametrize(("flags", "body"), [(9, b"{}"), (1, b"{}"), (0, b"[]")])
def test_a_stager_that_says_nonsense_of_a_step_is_given_up(port: FakePort, flags: int, body: bytes) -> None:
    link = make(port)
    port.say(Kind.SAVE_AT, step=5, arg=1)
    until(lambda: port.of(Kind.AT))
    waiting = threading.Thread(target=agreed_steps(link).reach, args=(5,))
    waiting.start()
    with port.lock:
        port.inbox.append(wire.encode(Kind.SAVE_AT, attempt=1, step=5, flags=flags, arg=1, body=body))
    waiting.join(SECONDS_MAX)
    assert not waiting.is_alive(), "training waits for a step that nobody will confirm"
    assert link.job.problem is not None
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)


def test_an_interval_is_wished_for_promised_and_kept(port: FakePort) -> None:
    link = make(port, auto=True)
    link.send_message(StagerMessage.pace_request(PaceRequest(5, 3, "every 5 steps: because")))
    until(lambda: port.of(Kind.WISH))
    assert wire.json_body(port.of(Kind.WISH)[0]) == {"every": 5, "after": 3, "why": "every 5 steps: because"}
    assert not schedule(link).reach(3)
    port.say(Kind.SAVE_EVERY, step=5, arg=1)
    until(lambda: port.of(Kind.HERE))
    (answer,) = port.of(Kind.HERE)
    assert (answer.step, answer.arg, answer.body) == (4, 1, b"{}")
    assert not schedule(link).reach(4)
    reached: list[bool] = []
    waiting = threading.Thread(target=lambda: reached.append(schedule(link).reach(5)))
    waiting.start()
    assert waiting.is_alive()
    body = wire.to_json({"first": 5, "every": 5})
    with port.lock:
        port.inbox.append(wire.encode(Kind.SAVE_EVERY, attempt=1, step=5, flags=1, arg=1, body=body))
    waiting.join(SECONDS_MAX)
    assert reached == [True]
    assert (schedule(link).phase, schedule(link).every) == (SchedulePhase.PACED, 5)
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)


def test_a_script_with_its_own_interval_refuses_another(link: Link, port: FakePort) -> None:
    port.say(Kind.SAVE_EVERY, step=0, arg=1)
    until(lambda: port.of(Kind.HERE))
    assert "it saves at its own steps" in wire.json_body(port.of(Kind.HERE)[0])["refusal"]


@pytest.mark.parametrize(
    ("flags", "body"), [(9, b"{}"), (1, b"{}"), (0, b"[]"), (1, b'{"first": 5, "every": 0}')]
)
def test_a_stager_that_says_nonsense_of_an_interval_is_given_up(
    port: FakePort, flags: int, body: bytes
) -> None:
    link = make(port, auto=True)
    port.say(Kind.SAVE_EVERY, step=5, arg=1)
    until(lambda: port.of(Kind.HERE))
    waiting = threading.Thread(target=schedule(link).reach, args=(5,))
    waiting.start()
    with port.lock:
        port.inbox.append(wire.encode(Kind.SAVE_EVERY, attempt=1, step=5, flags=flags, arg=1, body=body))
    waiting.join(SECONDS_MAX)
    assert not waiting.is_alive(), "training waits for an interval that nobody will confirm"
    assert link.job.problem is not None
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)


class Again:
    """A stager at the same address that welcomes this rank as the next attempt at each connection."""

    def __init__(self) -> None:
        self.ports: list[FakePort] = []
        self.reachable = threading.Event()

    def __call__(self, generation: int) -> FakePort:
        if not self.reachable.is_set():
            raise PeerLost("nobody is there")
        port = FakePort()
        port.inbox.append(Welcome("file:///run", 1 + generation, CHUNK, 8, 2, 60.0, 5.0).to_frame())
        self.ports.append(port)
        return port


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Again:
    monkeypatch.setattr(rejoining, "_PAUSE_SECONDS_MIN", 1e-3)
    monkeypatch.setattr(rejoining, "_PAUSE_SECONDS_MAX", 2e-3)
    return Again()


def _linked(port: FakePort, again: Again, rank: int = 0) -> Link:
    return make(port, rank=rank, reconnect=Reconnect(again, lambda: 0))


def _lose(link: Link, port: FakePort) -> None:
    port.dead = True
    until(lambda: link.job.problem)


def _reach(link: Link, again: Again) -> FakePort:
    again.reachable.set()
    until(lambda: link.job.is_alive)
    return again.ports[-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stager_that_comes_back_gets_the_layout_and_the_next_step(
    port: FakePort, again: Again, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    link = _linked(port, again, rank)
    _lose(link, port)
    assert "no checkpoints are taken until it is reached again; training goes on" in caplog.text
    assert offer(link, 3).state is TransferState.DECLINED
    assert link.job.stager_losses.losses == 1
    second = _reach(link, again)
    lost_seconds = link.job.stager_losses.seconds
    assert lost_seconds > 0
    assert link.job.stager_losses == (1, lost_seconds), "it counts while the stager is lost"
    assert f"rank {rank}: the stager is reached again" in caplog.text
    assert link.job.attempt == 2
    offer(link, 4)
    until(lambda: second.of(Kind.OFFER))
    assert [frame.step for frame in second.of(Kind.OFFER)] == [4]
    assert {frame.attempt for frame in second.messages if frame.kind is not Kind.HELLO} == {2}
    kinds = [frame.kind for frame in second.messages]
    assert kinds.count(Kind.LAYOUT) == (1 if rank == 0 else 0)
    if rank == 0:
        assert kinds.index(Kind.LAYOUT) < kinds.index(Kind.OFFER)
    # The others may have come before, and offered a step that this rank has passed.
    assert [frame.step for frame in second.of(Kind.DECLINE)] == [3]
    link.close(seconds_max=0.0)


def test_a_step_offered_while_the_stager_is_reached_again_is_offered_and_not_declined(
    port: FakePort, again: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread saves as soon as it sees the link alive, before the link's thread has told the rest."""
    link = _linked(port, again)
    _lose(link, port)
    offer(link, 3)
    mark_recovered = link.job.mark_recovered

    def recover_and_save() -> None:
        mark_recovered()
        offer(link, 4)

    monkeypatch.setattr(link.job, "mark_recovered", recover_and_save)
    second = _reach(link, again)
    until(lambda: second.of(Kind.OFFER))
    assert [frame.step for frame in second.of(Kind.DECLINE)] == [3]
    assert [frame.step for frame in second.of(Kind.OFFER)] == [4]
    link.close(seconds_max=0.0)


def test_the_layout_is_sent_once_to_each_stager(port: FakePort, again: Again) -> None:
    link = _linked(port, again)
    for step in (1, 2):
        offer(link, step)
    until(lambda: len(port.of(Kind.OFFER)) == 2)
    assert len(port.of(Kind.LAYOUT)) == 1
    _lose(link, port)
    second = _reach(link, again)
    offer(link, 3)
    until(lambda: second.of(Kind.OFFER))
    assert [frame.body for frame in second.of(Kind.LAYOUT)] == [LAYOUT.to_bytes()]
    link.close(seconds_max=0.0)


def test_a_step_only_staged_is_not_called_safe_after_a_loss(port: FakePort, again: Again) -> None:
    link = _linked(port, again)
    for step, word in ((1, Kind.DURABLE), (2, Kind.STAGED)):
        transfer = offer(link, step)
        for chunk, _ in LAYOUT.sent_frames(0):
            port.say(Kind.CREDIT, step=step, chunk=chunk, arg=chunk)
        until(lambda step=step: any(frame.step == step for frame in port.of(Kind.DONE)))  # type: ignore[misc]
        port.say(Kind.STAGED, step=step)
        if word is Kind.DURABLE:
            port.say(Kind.DURABLE, step=step)
        assert (transfer.ended if word is Kind.DURABLE else transfer.settled).wait(SECONDS_MAX)
    assert (link.job.durable_step, link.job.staged_step) == (1, 2)
    _lose(link, port)
    assert link._rejoining is not None
    assert "step 2 was staged on the lost stager" in link._rejoining._describe_risk()
    _reach(link, again)
    assert (link.job.durable_step, link.job.staged_step) == (1, 1)
    link.close(seconds_max=0.0)


def test_notices_and_doubts_of_the_time_without_a_stager_are_told_when_it_is_back(
    port: FakePort, again: Again
) -> None:
    link = _linked(port, again)
    _lose(link, port)
    link.send_message(StagerMessage.doubt(Doubt(0, (1, 3), "of the test")))
    link.send_message(StagerMessage.notice(Notice(NoticeKind.TERMINATE, time.time() + 60, "aws")))
    second = _reach(link, again)
    until(lambda: second.of(Kind.NOTICE))
    (doubt,) = [Doubt.from_frame(frame) for frame in second.of(Kind.DOUBT)]
    # Steps 1 to 3 were published by the attempt before.
    assert (doubt.steps, doubt.earlier_attempts) == ((1, 3), (1,))
    link.close(seconds_max=0.0)


def test_a_notice_whose_time_is_over_is_not_told_any_more(port: FakePort, again: Again) -> None:
    link = _linked(port, again)
    _lose(link, port)
    link.send_message(StagerMessage.notice(Notice(NoticeKind.TERMINATE, time.time() - 1, "aws")))
    second = _reach(link, again)
    offer(link, 9)
    until(lambda: second.of(Kind.OFFER))
    assert not second.of(Kind.NOTICE)
    link.close(seconds_max=0.0)


def test_a_stager_may_be_lost_and_reached_again_any_number_of_times(port: FakePort, again: Again) -> None:
    link = _linked(port, again)
    again.reachable.set()
    lost = port
    for step in range(1, 6):
        lost.dead = True
        until(lambda: link.job.attempt == 1 + step and link.job.is_alive)  # noqa: B023 (called at once)
        lost = again.ports[-1]
        offer(link, 10 * step)
        until(lambda: lost.of(Kind.OFFER))  # noqa: B023 (called at once)
    assert link.job.attempt == 6
    assert len(again.ports) == 5
    assert link.job.stager_losses.losses == 5
    link.close(seconds_max=0.0)
    assert lost.left


def test_a_caller_during_a_loss_hears_of_it_even_when_the_stager_is_back(
    port: FakePort, again: Again
) -> None:
    link = _linked(port, again)
    asking: list[HoldfastError] = []

    def ask() -> None:
        try:
            link.agree(Proposal("d", [], 1, {}))
        except HoldfastError as error:
            asking.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: port.of(Kind.PROPOSE))
    again.reachable.set()
    port.dead = True
    thread.join(SECONDS_MAX)
    until(lambda: again.ports and link.job.is_alive)
    assert link.job.is_last_loss(asking[0])
    assert not link.job.is_last_loss(PeerLost("of a rank"))
    link.close(seconds_max=0.0)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda port: port.inbox.append(b"x" * 50),
        lambda port: port.say(
            Kind.REFUSED, body={"code": "fenced", "message": "another writer owns this run"}
        ),
    ],
    ids=["noise", "fenced"],
)
def test_a_stager_that_a_person_must_look_at_is_not_sought(
    port: FakePort, again: Again, break_it: Callable[[FakePort], None], caplog: pytest.LogCaptureFixture
) -> None:
    again.reachable.set()
    link = _linked(port, again)
    break_it(port)
    until(lambda: link.job.problem)
    assert "no more checkpoints are taken in this job" in caplog.text
    link.close(seconds_max=0.0)
    assert not again.ports


def test_the_end_of_the_job_ends_the_search(port: FakePort, again: Again) -> None:
    link = _linked(port, again)
    _lose(link, port)
    link.close(seconds_max=SECONDS_MAX)
    until(lambda: not any(thread.name == "holdfast-rejoin" for thread in threading.enumerate()))
    assert not again.ports
