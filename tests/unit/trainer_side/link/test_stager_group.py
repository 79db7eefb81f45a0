"""Several stagers as one: the offer to each, and one verdict on a step from all verdicts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import PeerLost
from holdfast.image.save_record import SaveRecord
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX, Shares
from holdfast.image.slices import area_bytes
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.telemetry.causes import DeclineCause
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.welcome import Welcome
from tests.unit.trainer_side.stager_port import CHUNK, LAYOUT, SECONDS_MAX, FakePort, Source, make, until
from trainer_side.link.rejoining import Reconnect
from trainer_side.link.stager_group import StagerGroup
from trainer_side.link.stager_message import StagerMessage
from trainer_side.transfer import Transfer, TransferState

STAGERS = 2
SHARES = Shares.of(LAYOUT, STAGERS, 1)
FRAMES = [
    [chunk for chunk, _ in LAYOUT.sent_frames(0) if SHARES.owner(chunk) == index] for index in range(STAGERS)
]


class Scene:
    """A rank's group of two simulated stagers."""

    def __init__(self, tmp_path: Path, *, again: bool = False, **settings: Any) -> None:
        self.ports = [FakePort() for _ in range(STAGERS)]
        self.back: list[list[FakePort]] = [[], []]
        self.attempt, self.ring, self.now = 1, "a", 0.0
        self.closed: set[int] = set()  # stagers that nobody answers for
        self.events = tmp_path / "events"
        links = [
            make(
                port,
                member=index > 0,
                clock=lambda: time.monotonic() + self.now,
                reconnect=Reconnect(lambda _, index=index: self._come_again(index), lambda: 0)  # type: ignore[misc]
                if again
                else None,
                **settings,
            )
            for index, port in enumerate(self.ports)
        ]
        for index, link in enumerate(links):
            link.name = f"stager {index + 1}/{STAGERS}"
        self.group = StagerGroup(links, EventLog(self.events, role="trainer", rank=0))

    def _come_again(self, index: int) -> FakePort:
        if index in self.closed:
            raise PeerLost("nobody answers")
        port = FakePort()
        welcome = Welcome("file:///run", self.attempt, CHUNK, 8, 2, 60.0, 5.0, ring=self.ring)
        port.inbox.append(welcome.to_frame())
        self.back[index].append(port)
        return port

    def offer(self, step: int = 1, source: Source | None = None) -> Transfer:
        record = SaveRecord(saved_at_unix=time.time())
        return self.group.offer(step, source or Source(0), record, LAYOUT)

    def lose(self, index: int, *, comes_again: bool = True) -> None:
        """A stager dies; its next process has welcomed the rank when this returns."""
        if not comes_again:
            self.closed.add(index)
        times = len(self.back[index])
        self.ports[index].dead = True
        if not comes_again:
            until(lambda: self.group.job.problem)
            return
        until(lambda: len(self.back[index]) > times and self.group.job.problem is None)
        self.ports[index] = self.back[index][-1]

    def send(self, index: int, step: int = 1) -> None:
        """Have the rank send its whole share to a stager."""
        port = self.ports[index]
        for chunk in FRAMES[index]:
            port.say(Kind.CREDIT, step=step, chunk=chunk, arg=chunk)
        until(lambda: any(frame.step == step for frame in port.of(Kind.DONE)))

    def emitted(self) -> list[tuple[str, int]]:
        lines = map(json.loads, self.events.read_text().splitlines() if self.events.exists() else [])
        return [(line["event"], line["step"]) for line in lines]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.group.close(seconds_max=0.0)


def test_each_stager_gets_the_frames_of_its_share_and_the_layout(scene: Scene) -> None:
    assert all(FRAMES), "a share has no frame of this rank: the test would show nothing"
    scene.offer()
    for index, port in enumerate(scene.ports):
        scene.send(index)
        assert [frame.chunk for frame in port.of(Kind.SENT)] == FRAMES[index]
        assert len(port.of(Kind.LAYOUT)) == len(port.of(Kind.OFFER)) == 1


def test_the_lead_gets_the_fingerprints_of_a_rank_that_sends_it_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, rank=1)
    assert not [chunk for chunk, _ in LAYOUT.sent_frames(1) if SHARES.owner(chunk) == 0]
    source, lead = Source(1), scene.ports[0]
    source.ready = 0
    transfer = scene.offer(source=source)
    until(lambda: lead.of(Kind.OFFER))
    polls = lead.polls
    until(lambda: lead.polls > polls + 20)
    assert not lead.of(Kind.DONE)
    transfer.fingerprints = "AAAA"
    source.ready = area_bytes(LAYOUT, 1)
    until(lambda: lead.of(Kind.DONE))
    assert wire.json_body(lead.of(Kind.DONE)[0])["replicas"] == "AAAA"
    scene.group.close(seconds_max=0.0)


def test_a_credit_for_another_stagers_chunk_goes_back(scene: Scene) -> None:
    scene.offer()
    scene.ports[0].say(Kind.CREDIT, step=1, chunk=FRAMES[1][0], arg=5)
    until(lambda: scene.ports[0].of(Kind.RETURN))


def test_a_step_is_staged_and_its_memory_free_when_every_share_is_staged(scene: Scene) -> None:
    transfer = scene.offer()
    assert (transfer.frames, transfer.frames_left) == (sum(map(len, FRAMES)),) * 2
    for index in range(STAGERS):
        scene.send(index)
    until(lambda: transfer.state is TransferState.SENT)
    assert transfer.frames_left == 0
    scene.ports[0].say(Kind.STAGED, step=1)
    scene.ports[0].say(Kind.BEAT)
    until(lambda: scene.ports[0].of(Kind.BEAT))
    assert not transfer.settled.is_set()
    assert not transfer.released.is_set()
    assert scene.group.job.staged_step == -1
    scene.ports[1].say(Kind.STAGED, step=1)
    assert transfer.settled.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert scene.group.job.staged_step == 1
    scene.ports[1].say(Kind.DURABLE, step=1)
    scene.ports[1].say(Kind.BEAT)
    until(lambda: scene.ports[1].of(Kind.BEAT))
    assert not transfer.ended.is_set(), "the lead publishes"
    scene.ports[0].say(Kind.DURABLE, step=1)
    assert transfer.ended.wait(SECONDS_MAX)
    assert (transfer.state, scene.group.job.durable_step) == (TransferState.DURABLE, 1)
    until(lambda: scene.emitted() == [("staged", 1), ("durable", 1)])


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_tells_the_lead_when_every_share_is_staged(tmp_path: Path, rank: int) -> None:
    scene = Scene(tmp_path, rank=rank)
    scene.offer(source=Source(rank))
    for port in scene.ports:
        assert not scene.ports[0].of(Kind.ALL_STAGED)
        port.say(Kind.STAGED, step=1)
        port.say(Kind.BEAT)
        until(lambda port=port: port.of(Kind.BEAT))  # type: ignore[misc]
    until(lambda: scene.emitted() == [("staged", 1)])
    scene.group.close(seconds_max=0.0)
    assert [frame.step for frame in scene.ports[0].of(Kind.ALL_STAGED)] == [1] * (rank == 0)
    assert not scene.ports[1].of(Kind.ALL_STAGED)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_share_that_fails_ends_the_step_at_the_other_stagers(scene: Scene, failing: int) -> None:
    transfer = scene.offer()
    other = scene.ports[1 - failing]
    scene.send(1 - failing)
    other.say(Kind.STAGED, step=1)
    scene.ports[failing].say(Kind.FAILED, step=1, body={"code": "store", "message": "the store is full"})
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert (transfer.state, transfer.reason and transfer.reason.cause) == (TransferState.FAILED, "store")
    until(lambda: other.of(Kind.DECLINE))
    (decline,) = other.of(Kind.DECLINE)
    assert (decline.step, decline.body.decode()) == (1, f"the store is full (stager {failing + 1}/2)")
    until(lambda: scene.emitted() == [("failed", 1)])
    assert not scene.ports[failing].of(Kind.DECLINE)


def test_a_rank_that_loses_a_stager_before_its_share_was_sent_tells_the_others(scene: Scene) -> None:
    transfer = scene.offer()
    scene.ports[1].dead = True
    assert transfer.ended.wait(SECONDS_MAX)
    until(lambda: scene.ports[0].of(Kind.DECLINE))
    assert "its process is dead (stager 2/2)" in scene.ports[0].of(Kind.DECLINE)[0].body.decode()


def test_a_rank_that_loses_a_stager_after_its_share_was_sent_tells_nothing(scene: Scene) -> None:
    transfer = scene.offer()
    for index in range(STAGERS):
        scene.send(index)
    until(lambda: transfer.state is TransferState.SENT)
    scene.ports[1].dead = True
    assert transfer.ended.wait(SECONDS_MAX)
    scene.ports[0].say(Kind.DURABLE, step=1)  # it was staged there after all
    until(lambda: scene.group.job.durable_step == 1)
    assert not scene.ports[0].of(Kind.DECLINE)


def test_a_step_is_offered_to_no_stager_while_one_is_lost_and_the_others_hear_why(scene: Scene) -> None:
    scene.ports[1].dead = True
    until(lambda: scene.group.job.problem)
    assert not scene.group.job.is_alive
    assert "stager 2/2: the stager: its process is dead" in str(scene.group.job.problem)
    assert scene.group.job.lead_problem is None, "it names a step after a notice"
    transfer = scene.offer()
    assert (transfer.state, transfer.released.is_set()) == (TransferState.DECLINED, True)
    until(lambda: scene.ports[0].of(Kind.DECLINE))
    assert not scene.ports[0].of(Kind.OFFER)


def test_a_step_that_is_not_new_is_declined_here(scene: Scene) -> None:
    scene.offer(5)
    transfer = scene.offer(5)
    assert "not above step 5" in str(transfer.reason)
    until(lambda: all(port.of(Kind.OFFER) for port in scene.ports))
    assert [len(port.of(Kind.OFFER)) for port in scene.ports] == [1, 1]


def test_an_answer_of_any_stager_counts(scene: Scene) -> None:
    assert scene.group.decline_reason(3) is None
    scene.ports[1].say(Kind.DECLINED, step=3, body={"reason": "rank 1: busy", "cause": "busy"})
    until(lambda: scene.group.decline_reason(3))
    assert str(scene.group.decline_reason(3)) == "rank 1: busy"


def test_agreements_and_news_go_through_the_lead_alone(scene: Scene) -> None:
    for message in (
        StagerMessage.fits(1),
        StagerMessage.notice(Notice(NoticeKind.TERMINATE, time.time() + 60, "aws")),
    ):
        scene.group.send_message(message)
    until(lambda: scene.ports[0].of(Kind.NOTICE))
    scene.group.decline(2, DeclineCause.OUTGROWN.because("of the test"), needed_pickle_bytes=9)
    until(lambda: all(port.of(Kind.DECLINE) for port in scene.ports))
    assert not scene.ports[1].of(Kind.FITS) + scene.ports[1].of(Kind.NOTICE)
    assert all(port.of(Kind.DECLINE)[0].arg == 9 for port in scene.ports)


def test_a_member_may_not_name_a_step_that_all_save(scene: Scene) -> None:
    scene.ports[1].say(Kind.SAVE_AT, step=9, arg=1)
    until(lambda: scene.group.job.problem)
    assert "which only ranks may send, or the first of several stagers" in str(scene.group.job.problem)


def test_the_problem_names_the_stager_that_is_lost_now(again: Scene) -> None:
    again.lose(1, comes_again=False)
    again.closed.add(0)
    again.ports[0].dead = True
    until(lambda: again.group.job.lead_problem)
    assert str(again.group.job.problem).startswith("stager 2/2: ")
    again.closed.discard(1)
    until(lambda: again.group.job.problem is again.group.job.lead_problem)
    assert again.group.job.problem is not None


def test_a_member_that_is_back_is_saved_to_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, again=True)
    scene.ports[1].dead = True
    until(lambda: scene.back[1] and scene.group.job.problem is None)
    scene.ports[1] = scene.back[1][0]
    assert scene.group.job.stager_losses.losses == 1
    assert not scene.back[0], "the lead was not lost"
    transfer = scene.offer(2)
    for index in range(STAGERS):
        scene.send(index, 2)
        scene.ports[index].say(Kind.STAGED, step=2)
    assert transfer.settled.wait(SECONDS_MAX)
    assert transfer.state is TransferState.STAGED
    scene.group.close(seconds_max=0.0)


def test_all_stagers_are_met_again_when_the_lead_was_lost(tmp_path: Path) -> None:
    scene = Scene(tmp_path, again=True)
    scene.attempt = 2
    scene.ports[0].dead = True
    until(lambda: all(scene.back) and scene.group.job.problem is None)
    assert scene.ports[1].left
    assert scene.group.job.attempts == (1, 2)
    scene.group.close(seconds_max=0.0)
    assert all(ports[-1].left for ports in scene.back)


def test_the_others_are_left_at_once_when_the_lead_is_lost_for_good(scene: Scene) -> None:
    scene.ports[0].dead = True
    until(lambda: scene.ports[1].left)  # it would else take the rank for silent
    assert scene.group.job.problem is not None
    assert scene.group.job.lead_problem is not None


def test_close_waits_until_the_lead_says_durable_and_leaves_all(scene: Scene) -> None:
    transfer = scene.offer()
    for index in range(STAGERS):
        scene.send(index)
        scene.ports[index].say(Kind.STAGED, step=1)
    scene.ports[0].say(Kind.DURABLE, step=1)
    scene.group.close(seconds_max=SECONDS_MAX)
    assert transfer.state is TransferState.DURABLE
    assert all(port.left for port in scene.ports)
    scene.group.close(seconds_max=SECONDS_MAX)


def test_a_rank_that_closes_declines_a_step_whose_stager_it_loses_meanwhile(scene: Scene) -> None:
    transfer = scene.offer()
    scene.send(0)
    closing = threading.Thread(target=lambda: scene.group.close(seconds_max=SECONDS_MAX))
    closing.start()
    time.sleep(0.05)  # it waits for the step by now; a slow machine makes the test easier, not wrong
    scene.ports[1].dead = True
    closing.join(SECONDS_MAX)
    assert transfer.state is TransferState.FAILED
    assert [frame.step for frame in scene.ports[0].of(Kind.DECLINE)] == [1]


def test_a_closed_group_tells_no_stager_of_the_others(scene: Scene) -> None:
    transfer = scene.offer()
    scene.group.close(seconds_max=0.0)
    assert (transfer.state, transfer.released.is_set()) == (TransferState.FAILED, True)
    assert not any(port.of(Kind.DECLINE) for port in scene.ports)


@pytest.fixture
def again(tmp_path: Path) -> Iterator[Scene]:
    """As `scene`, where stagers come again."""
    scene = Scene(tmp_path, again=True)
    yield scene
    scene.group.close(seconds_max=0.0)


@pytest.mark.parametrize("sent", [False, True])
def test_the_next_process_of_a_stager_is_sent_the_same_step_once_more(again: Scene, sent: bool) -> None:
    transfer = again.offer()
    again.send(0)
    again.ports[0].say(Kind.STAGED, step=1)
    if sent:
        again.send(1)
    before = again.ports[1].payloads
    again.lose(1)
    assert not transfer.settled.is_set()
    assert not transfer.released.is_set()
    assert [frame.step for frame in again.ports[1].of(Kind.OFFER)] == [1]
    assert not again.ports[1].of(Kind.DECLINE)
    again.send(1)
    assert [frame.chunk for frame in again.ports[1].of(Kind.SENT)] == FRAMES[1]
    assert not before or again.ports[1].payloads == before
    assert not transfer.settled.is_set()
    again.ports[1].say(Kind.STAGED, step=1)
    assert transfer.settled.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert (transfer.state, again.group.job.staged_step) == (TransferState.STAGED, 1)
    again.ports[0].say(Kind.DURABLE, step=1)
    assert transfer.ended.wait(SECONDS_MAX)
    assert not again.ports[0].of(Kind.DECLINE)
    until(lambda: again.emitted() == [("staged", 1), ("durable", 1)])


def test_a_share_that_the_stager_before_had_staged_is_not_sent_again(again: Scene) -> None:
    transfer = again.offer()
    for index in range(STAGERS):
        again.send(index)
    again.ports[0].say(Kind.STAGED, step=1)
    again.lose(1)
    again.ports[1].say(Kind.STAGED, step=1)  # its ring says so
    assert transfer.settled.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.STAGED
    assert not again.ports[1].of(Kind.SENT) + again.ports[1].of(Kind.DONE)


@pytest.mark.parametrize("outcome", [Kind.DURABLE, Kind.FAILED])
def test_a_staged_step_ends_as_the_lead_says_although_another_stager_is_lost(
    again: Scene, outcome: Kind
) -> None:
    transfer = again.offer()
    for index in range(STAGERS):
        again.send(index)
        again.ports[index].say(Kind.STAGED, step=1)
    assert transfer.settled.wait(SECONDS_MAX)
    again.lose(1, comes_again=False)
    time.sleep(0.02)
    assert not transfer.ended.is_set()
    again.ports[0].say(outcome, step=1, body={"code": "store", "message": "share 2 of 2 is lost"})
    assert transfer.ended.wait(SECONDS_MAX)
    until(lambda: again.emitted() == [("staged", 1), (outcome.name.lower(), 1)])


def test_all_stagers_may_be_lost_at_once(again: Scene) -> None:
    transfer = again.offer()
    for index in range(STAGERS):
        again.send(index)
    until(lambda: transfer.state is TransferState.SENT)
    for port in again.ports:
        port.dead = True
    until(lambda: all(again.back) and again.group.job.problem is None)
    again.ports = [ports[-1] for ports in again.back]
    for index in range(STAGERS):
        again.send(index)
        again.ports[index].say(Kind.STAGED, step=1)
    assert transfer.settled.wait(SECONDS_MAX)
    assert transfer.state is TransferState.STAGED


def test_a_stager_may_be_lost_twice(again: Scene) -> None:
    transfer = again.offer()
    for _ in range(2):
        again.lose(1)
        assert again.ports[1].of(Kind.OFFER)
    again.now = LOST_STAGER_SECONDS_MAX - 10
    again.lose(1, comes_again=False)
    again.now = LOST_STAGER_SECONDS_MAX + 10
    assert transfer.ended.wait(SECONDS_MAX)
    assert "not reached again within 60 s" in str(transfer.reason)
    assert transfer.released.wait(SECONDS_MAX)
    until(lambda: again.ports[0].of(Kind.DECLINE))


@pytest.mark.parametrize("sent", [False, True])
def test_a_stager_that_does_not_come_again_costs_the_step_after_a_while(again: Scene, sent: bool) -> None:
    transfer = again.offer()
    again.send(0)
    if sent:
        again.send(1)
    again.lose(1, comes_again=False)
    time.sleep(0.05)
    assert not transfer.ended.is_set()
    again.now = LOST_STAGER_SECONDS_MAX + 1
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    until(lambda: again.emitted() == [("failed", 1)])
    if sent:  # it may be staged there
        assert not again.ports[0].of(Kind.DECLINE)
    else:
        until(lambda: again.ports[0].of(Kind.DECLINE))


def test_beside_local_tiers_a_lost_stager_costs_the_step_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, again=True, tiers=["memory"])
    transfer = scene.offer()
    scene.lose(1, comes_again=False)
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX), "the next step needs its memory"
    assert transfer.state is TransferState.FAILED
    until(lambda: scene.ports[0].of(Kind.DECLINE))
    scene.group.close(seconds_max=0.0)


def test_a_stager_with_another_ring_costs_the_step(again: Scene) -> None:
    transfer = again.offer()
    again.ring = "b"
    again.lose(1)
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.FAILED
    assert not again.ports[1].of(Kind.OFFER)
    until(lambda: again.ports[0].of(Kind.DECLINE))
    until(lambda: again.ports[1].of(Kind.DECLINE))


def test_a_step_that_fails_elsewhere_meanwhile_is_declined_at_the_next_process(again: Scene) -> None:
    transfer = again.offer()
    again.lose(1, comes_again=False)
    again.ports[0].say(Kind.FAILED, step=1, body={"code": "store", "message": "the store is full"})
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    again.closed.clear()
    until(lambda: again.back[1] and again.back[1][-1].of(Kind.DECLINE))
    assert not again.back[1][-1].of(Kind.OFFER)
    assert [frame.step for frame in again.back[1][-1].of(Kind.DECLINE)] == [1]


def test_a_step_that_fails_after_it_was_offered_again_frees_its_memory(again: Scene) -> None:
    transfer = again.offer()
    again.lose(1)
    again.ports[1].say(Kind.FAILED, step=1, body={"code": "peer_lost", "message": "rank 1 is gone"})
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    until(lambda: again.ports[0].of(Kind.DECLINE))


def test_a_lost_lead_costs_a_step_that_waits_for_another_stager(again: Scene) -> None:
    transfer = again.offer()
    again.lose(1, comes_again=False)
    again.closed.add(0)
    again.ports[0].dead = True
    until(lambda: again.group.job.lead_problem)
    assert not transfer.ended.is_set()
    again.now = LOST_STAGER_SECONDS_MAX + 1
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.FAILED


def test_a_rank_that_leaves_declines_a_step_that_waits_for_a_stager(again: Scene) -> None:
    transfer = again.offer()
    again.lose(1, comes_again=False)
    again.group.close(seconds_max=0.0)
    assert (transfer.state, transfer.released.is_set()) == (TransferState.FAILED, True)
    assert [frame.step for frame in again.ports[0].of(Kind.DECLINE)] == [1]


def test_the_newest_step_that_passed_without_the_stager_is_declined_after_the_older_is_offered(
    again: Scene,
) -> None:
    again.offer(1)
    again.lose(1, comes_again=False)
    again.offer(2)
    again.closed.clear()
    until(lambda: again.back[1] and again.back[1][-1].of(Kind.DECLINE))
    said = [(frame.kind, frame.step) for frame in again.back[1][-1].messages if frame.step]
    assert said[:2] == [(Kind.OFFER, 1), (Kind.DECLINE, 2)]


@pytest.mark.parametrize("sent", [False, True])
def test_the_next_process_of_the_lead_is_sent_the_same_step_once_more(again: Scene, sent: bool) -> None:
    transfer, member = again.offer(), again.ports[1]
    again.send(1)
    member.say(Kind.STAGED, step=1)
    if sent:
        again.send(0)
    again.lose(0)
    assert not transfer.settled.is_set()
    assert not transfer.released.is_set()
    assert again.ports[1] is member
    assert not member.left, "its staged share is kept"
    assert [frame.step for frame in again.ports[0].of(Kind.OFFER)] == [1]
    assert len(again.ports[0].of(Kind.LAYOUT)) == 1
    again.send(0)
    assert [frame.chunk for frame in again.ports[0].of(Kind.SENT)] == FRAMES[0]
    again.ports[0].say(Kind.STAGED, step=1)
    assert transfer.settled.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert (transfer.state, again.group.job.staged_step) == (TransferState.STAGED, 1)
    assert again.group.job.attempts == (1,)
    again.ports[0].say(Kind.DURABLE, step=1)
    assert transfer.ended.wait(SECONDS_MAX)
    assert not again.back[1]
    assert not member.of(Kind.DECLINE)
    until(lambda: again.emitted() == [("staged", 1), ("durable", 1)])


def test_a_step_that_became_durable_while_the_lead_was_lost_is_heard_of_later(again: Scene) -> None:
    transfer = again.offer()
    for index in range(STAGERS):
        again.send(index)
    again.ports[1].say(Kind.STAGED, step=1)
    again.lose(0)
    again.ports[0].say(Kind.DURABLE, step=1)  # its answer to the offer
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert (transfer.state, again.group.job.durable_step) == (TransferState.DURABLE, 1)
    assert not again.ports[0].of(Kind.SENT)


def test_a_lead_with_another_attempt_costs_the_step_and_all_stagers_are_met_again(again: Scene) -> None:
    transfer, member = again.offer(), again.ports[1]
    again.send(1)
    again.attempt = 2
    again.ports[0].dead = True
    until(lambda: all(again.back) and again.group.job.problem is None)
    assert transfer.state is TransferState.FAILED
    assert transfer.released.is_set()
    assert member.left
    assert not any(port.of(Kind.OFFER) for ports in again.back for port in ports)
    assert again.group.job.attempts == (1, 2)


def test_a_lead_that_does_not_come_again_costs_the_step_after_a_while_and_the_others_are_left(
    again: Scene,
) -> None:
    transfer, member = again.offer(), again.ports[1]
    again.send(1)
    again.closed.add(0)
    again.ports[0].dead = True
    until(lambda: again.group.job.problem)
    time.sleep(0.05)
    assert not transfer.ended.is_set()
    assert not member.left
    again.closed.add(1)
    again.now = LOST_STAGER_SECONDS_MAX + 1
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    until(lambda: member.left)
    assert [frame.step for frame in member.of(Kind.DECLINE)] == [1]
    until(lambda: again.emitted() == [("failed", 1)])


def test_beside_local_tiers_a_lost_lead_costs_the_step_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, again=True, tiers=["memory"])
    transfer = scene.offer()
    scene.lose(0, comes_again=False)
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX), "the next step needs its memory"
    until(lambda: scene.ports[1].left)
    scene.group.close(seconds_max=0.0)


def test_a_step_that_was_sent_waits_for_all_stagers_if_they_are_lost_at_the_same_time(again: Scene) -> None:
    transfer = again.offer()
    for index in range(STAGERS):
        again.send(index)
    until(lambda: transfer.state is TransferState.SENT)
    again.closed |= {0, 1}
    for port in again.ports:
        port.dead = True
    until(lambda: all(link.job.problem for link in again.group._links))
    again.closed.clear()
    until(lambda: all(again.back) and again.group.job.problem is None)
    for index, (port,) in enumerate(again.back):
        again.ports[index] = port
        assert [frame.step for frame in port.of(Kind.OFFER)] == [1]
        again.send(index)
        port.say(Kind.STAGED, step=1)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.STAGED


def test_a_step_that_is_declined_while_all_stagers_are_lost_is_not_sent_again(again: Scene) -> None:
    transfer = again.offer()
    again.closed |= {0, 1}
    for port in again.ports:
        port.dead = True
    until(lambda: all(link.job.problem for link in again.group._links))
    again.group.decline(1, DeclineCause.TORN.because("a tensor was changed"))
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.DECLINED
    again.closed.clear()
    until(lambda: all(ports and ports[-1].of(Kind.DECLINE) for ports in again.back))
    assert not any(ports[-1].of(Kind.OFFER) for ports in again.back)
