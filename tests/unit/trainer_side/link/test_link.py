"""The link against a stager that the test plays: what is said, what is lost, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from holdfast.config import TrainerConfig
from holdfast.errors import HoldfastError, PeerLost, StateError
from holdfast.notices.notice import Notice, NoticeKind, Terms
from holdfast.telemetry.causes import DeclineCause
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.pace import Wish
from holdfast.wire.state_messages import Proposal
from holdfast.wire.welcome import Welcome
from tests.unit.trainer_side.stager_port import CHUNK, LAYOUT, SECONDS_MAX, FakePort, make, offer, until
from trainer_side.link.link import Link
from trainer_side.link.schedule import SchedulePhase
from trainer_side.transfer import TransferState


def test_a_beat_is_answered(link: Link, port: FakePort) -> None:
    port.say(Kind.BEAT)
    until(lambda: port.of(Kind.BEAT))
    assert len(port.of(Kind.BEAT)) == 1


def test_only_rank_0_sends_the_layout(port: FakePort) -> None:
    link = make(port, rank=1)
    link.announce(LAYOUT)
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


def test_an_offer_without_a_layout_is_an_error(port: FakePort) -> None:
    link = make(port)
    with pytest.raises(StateError, match="before a layout"):
        offer(link)
    link.close(seconds_max=0.0)


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
    assert isinstance(link.problem, HoldfastError)
    later = offer(link, 2)
    assert (later.state, later.released.is_set()) == (TransferState.DECLINED, True)
    with pytest.raises(type(link.problem)):
        link.agree(Proposal("d", [], 1, {}))
    assert len([r for r in caplog.records if "no more checkpoints are taken" in r.getMessage()]) == 1
    link.close(seconds_max=SECONDS_MAX)
    assert port.left


def test_a_rank_that_missed_a_save_of_the_others_keeps_its_stager(
    link: Link, port: FakePort, caplog: pytest.LogCaptureFixture
) -> None:
    port.say(Kind.REFUSED, body={"code": "peer_lost", "message": "the stager waited 60 s for rank 0"})
    until(lambda: "has not come to a save of the other ranks: the stager waited 60 s" in caplog.text)
    assert link.problem is None
    offer(link)
    until(lambda: port.of(Kind.OFFER))


def test_a_silent_stager_is_lost_after_its_deadline_and_not_before(port: FakePort) -> None:
    now = [0.0]
    welcome = Welcome("file:///run", 1, CHUNK, 8, 2, 60.0, 5.0)
    link = Link(TrainerConfig(stager_seconds_max=30), port, welcome, rank=0, ranks=2, clock=lambda: now[0])

    def pass_seconds(seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            now[0] += 0.5
            turned = link._silence.looked_at
            until(lambda: link._silence.looked_at > turned or link.problem)  # noqa: B023 (called at once)

    def problem() -> HoldfastError | None:
        return link.problem

    pass_seconds(29)
    assert problem() is None
    port.say(Kind.BEAT)
    until(lambda: link._silence.seconds == 0)
    now[0] += 1000.0  # this process was stopped: it has not listened
    until(lambda: link._silence.looked_at == now[0])
    assert problem() is None
    pass_seconds(30)
    until(problem)
    assert isinstance(problem(), PeerLost)
    assert "heard nothing from the stager for 30 s" in str(problem())
    link.close(seconds_max=0.0)


def test_close_waits_for_durable(link: Link, port: FakePort) -> None:
    transfer = offer(link)
    for chunk, _ in LAYOUT.sends(0):
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
    link.notice(Notice(NoticeKind.TERMINATE, time.time() + 60, "aws"))
    until(lambda: port.of(Kind.NOTICE))
    assert wire.json_body(port.of(Kind.NOTICE)[0])["source"] == "aws"
    link.appointments.restored(6)
    port.say(Kind.SAVE_AT, step=9, arg=1)
    until(lambda: port.of(Kind.AT))
    (answer,) = port.of(Kind.AT)
    assert (answer.step, answer.arg, answer.body) == (7, 1, b"{}")
    assert link.appointments.reach(8) is None
    reached: list[Terms | None] = []
    waiting = threading.Thread(target=lambda: reached.append(link.appointments.reach(9)))
    waiting.start()
    terms = Terms(True, "there is time", Notice(NoticeKind.TERMINATE, time.time() + 60, "aws", rank=1))
    message = wire.encode(Kind.SAVE_AT, attempt=1, step=9, flags=1, arg=1, body=wire.to_json(terms.to_json()))
    assert waiting.is_alive()
    with port.lock:
        port.inbox.append(message)
    waiting.join(SECONDS_MAX)
    (found,) = reached
    assert found is not None
    assert found.save
    assert link.appointments.notice is not None
    assert link.appointments.notice.rank == 1


@pytest.mark.parametrize(("flags", "body"), [(9, b"{}"), (1, b"{}"), (0, b"[]")])
def test_a_stager_that_says_nonsense_of_a_step_is_given_up(
    port: FakePort, flags: int, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    link = make(port)
    port.say(Kind.SAVE_AT, step=5, arg=1)
    until(lambda: port.of(Kind.AT))
    waiting = threading.Thread(target=link.appointments.reach, args=(5,))
    waiting.start()
    with port.lock:
        port.inbox.append(wire.encode(Kind.SAVE_AT, attempt=1, step=5, flags=flags, arg=1, body=body))
    waiting.join(SECONDS_MAX)
    assert not waiting.is_alive(), "training waits for a step that nobody will confirm"
    assert link.problem is not None
    link.notice(Notice(NoticeKind.TERMINATE, time.time() + 60, "aws"))
    assert "the stager is lost, so no step is named" in caplog.text
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)


def test_an_interval_is_wished_for_promised_and_kept(link: Link, port: FakePort) -> None:
    link.schedule.choose(auto=True)
    link.wish(Wish(5, 3, "every 5 steps: because"))
    until(lambda: port.of(Kind.WISH))
    assert wire.json_body(port.of(Kind.WISH)[0]) == {"every": 5, "after": 3, "why": "every 5 steps: because"}
    assert not link.schedule.reach(3)
    port.say(Kind.SAVE_EVERY, step=5, arg=1)
    until(lambda: port.of(Kind.HERE))
    (answer,) = port.of(Kind.HERE)
    assert (answer.step, answer.arg, answer.body) == (4, 1, b"{}")
    assert not link.schedule.reach(4)
    reached: list[bool] = []
    waiting = threading.Thread(target=lambda: reached.append(link.schedule.reach(5)))
    waiting.start()
    assert waiting.is_alive()
    body = wire.to_json({"first": 5, "every": 5})
    with port.lock:
        port.inbox.append(wire.encode(Kind.SAVE_EVERY, attempt=1, step=5, flags=1, arg=1, body=body))
    waiting.join(SECONDS_MAX)
    assert reached == [True]
    assert (link.schedule.phase, link.schedule.every) == (SchedulePhase.PACED, 5)


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
    link = make(port)
    link.schedule.choose(auto=True)
    port.say(Kind.SAVE_EVERY, step=5, arg=1)
    until(lambda: port.of(Kind.HERE))
    waiting = threading.Thread(target=link.schedule.reach, args=(5,))
    waiting.start()
    with port.lock:
        port.inbox.append(wire.encode(Kind.SAVE_EVERY, attempt=1, step=5, flags=flags, arg=1, body=body))
    waiting.join(SECONDS_MAX)
    assert not waiting.is_alive(), "training waits for an interval that nobody will confirm"
    assert link.problem is not None
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)
