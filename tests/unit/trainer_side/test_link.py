"""The link against a stager that the test plays: every message is written out, MPI is a pair of lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import wire
from holdfast.config import TrainerConfig
from holdfast.crc import crc32
from holdfast.errors import HoldfastError, PeerLost, StateError
from holdfast.layout import REPLICATED, Entry, Layout
from holdfast.notice import Notice, NoticeKind, Terms
from holdfast.pace import Wish
from holdfast.slices import area_bytes, frames_of
from holdfast.wire import Agreement, Frame, Kind, Proposal, Welcome
from trainer_side.link import Link, Transfer, TransferState
from trainer_side.pace.schedule import Phase

CHUNK = 4096
LAYOUT = Layout(
    4 * CHUNK,
    CHUNK,
    2,
    (Entry("a", 64, 3 * CHUNK, REPLICATED, ()), Entry("rng", 4 * CHUNK - 200, 100, 0, ())),
)
SECONDS_MAX = 60.0


class FakePort:
    """MPI as the link sees it. `hold` keeps payloads under way; `dead` raises as MPI does for a dead stager."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inbox: list[bytes] = []
        self.messages: list[Frame] = []
        self.payloads: list[tuple[int, bytes]] = []
        self.hold = False
        self.dead = False
        self.left = False
        self.polls = 0
        self.one_machine = True

    def _check(self) -> None:
        if self.dead:
            raise PeerLost("the stager: its process is dead")

    def send(self, message: bytes) -> None:
        self._check()
        with self.lock:
            self.messages.append(wire.decode(message))

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        self._check()
        assert sum(pieces) == len(payload)
        with self.lock:
            self.payloads.append((slot, bytes(payload)))
            return len(self.payloads)

    def sent(self, handle: int) -> bool:
        self._check()
        return not self.hold

    def poll(self) -> list[bytes]:
        self._check()
        self.polls += 1
        with self.lock:
            inbox, self.inbox = self.inbox, []
        return inbox

    def leave(self, seconds_max: float, *, lost: bool = False) -> None:
        self.left = True

    # -- the test's side

    def say(
        self, kind: Kind, *, step: int = 0, chunk: int = 0, arg: int = 0, body: dict[str, Any] | None = None
    ) -> None:
        message = wire.encode(kind, attempt=1, step=step, chunk=chunk, arg=arg, body=wire.to_json(body or {}))
        with self.lock:
            self.inbox.append(message)

    def of(self, kind: Kind) -> list[Frame]:
        with self.lock:
            return [frame for frame in self.messages if frame.kind is kind]


class Source:
    def __init__(self, rank: int) -> None:
        self.data = bytes(range(256)) * (area_bytes(LAYOUT, rank) // 256 + 1)
        self.ready = area_bytes(LAYOUT, rank)
        self.views = 0
        self.frames = {frame.offset: frame.nbytes for frame in frames_of(LAYOUT, rank)}

    def view(self, offset: int, nbytes: int) -> memoryview:
        self.views += 1
        return memoryview(self.data)[offset : offset + nbytes]

    def is_ready(self, offset: int) -> bool:
        end = offset + self.frames[offset]
        return end <= self.ready


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


@pytest.fixture
def port() -> FakePort:
    return FakePort()


def make(port: FakePort, *, rank: int = 0, **settings: Any) -> Link:
    welcome = Welcome("file:///run", 1, CHUNK, 8, 2, 60.0, 5.0)
    return Link(TrainerConfig(**settings), port, welcome, rank=rank, ranks=2)


@pytest.fixture
def link(port: FakePort) -> Iterator[Link]:
    link = make(port)
    link.announce(LAYOUT)
    yield link
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)


def offer(link: Link, step: int = 1, source: Source | None = None) -> Transfer:
    return link.offer(step, source or Source(link.rank), {"saved_at_unix": time.time()})


def test_a_checkpoint_from_offer_to_durable(link: Link, port: FakePort) -> None:
    until(lambda: port.of(Kind.LAYOUT))
    assert Layout.from_bytes(port.of(Kind.LAYOUT)[0].body) == LAYOUT
    source = Source(0)
    transfer = offer(link, 1, source)
    until(lambda: port.of(Kind.OFFER))
    assert wire.json_body(port.of(Kind.OFFER)[0])["layout_digest"] == LAYOUT.digest
    for slot, (chunk, _, offset, nbytes) in enumerate(frames_of(LAYOUT, 0)):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=10 + slot)
        until(lambda: len(port.of(Kind.SENT)) == slot + 1)  # noqa: B023 (called at once)
        sent, expected = port.of(Kind.SENT)[-1], source.data[offset : offset + nbytes]
        assert (sent.step, sent.chunk, sent.arg, sent.flags) == (1, chunk, nbytes, crc32(expected))
        assert port.payloads[-1] == (10 + slot, expected)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.SENT
    assert not transfer.settled.is_set()
    (done,) = port.of(Kind.DONE)
    assert wire.json_body(done)["sent_bytes"] == LAYOUT.slice_bytes(0)
    port.say(Kind.STAGED, step=1)
    assert transfer.settled.wait(SECONDS_MAX)
    assert (transfer.state, link.staged_step, link.durable_step) == (TransferState.STAGED, 1, -1)
    port.say(Kind.DURABLE, step=1)
    assert transfer.ended.wait(SECONDS_MAX)
    assert link.durable_step == 1
    assert {"sending_seconds", "sent_seconds", "staged_seconds", "durable_seconds"} <= transfer.record.keys()


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


def test_nothing_is_sent_before_it_is_copied(link: Link, port: FakePort) -> None:
    source = Source(0)
    first = next(iter(LAYOUT.sends(0)))
    source.ready = sum(extent.nbytes for extent in first[1]) - 1
    offer(link, 1, source)
    for chunk, _ in LAYOUT.sends(0):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=chunk)
    until(lambda: not port.inbox)
    time.sleep(0.02)
    assert not port.payloads
    source.ready += 1
    until(lambda: port.payloads)
    time.sleep(0.02)
    assert len(port.payloads) == 1


def test_it_polls_without_a_pause_only_while_mpi_takes_a_payload_to_pieces(
    port: FakePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.wire._PIECES_APART_MAX", 1)
    monkeypatch.setattr("trainer_side.outgoing._STALL_SECONDS", SECONDS_MAX)
    pauses: list[float] = []
    own_time = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("trainer_side.link.time", own_time)
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
    monkeypatch.setattr("trainer_side.link.time", own_time)
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


def test_crcs_are_computed_before_the_credits_come(link: Link, port: FakePort) -> None:
    source = Source(0)
    transfer = offer(link, 1, source)
    until(lambda: source.views == len(list(LAYOUT.sends(0))))
    assert transfer.record["crc_seconds"] > 0
    assert not port.payloads
    frames = list(LAYOUT.sends(0))
    for chunk, _ in reversed(frames):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=chunk)
    until(lambda: len(port.of(Kind.SENT)) == len(frames))
    assert [sent.flags for sent in port.of(Kind.SENT)] == [crc32(payload) for _, payload in port.payloads]
    assert source.views == 2 * len(frames), "each frame is summed once and sent once"


def test_a_frame_is_not_summed_before_it_is_copied(link: Link, port: FakePort) -> None:
    source = Source(0)
    source.ready = 0
    offer(link, 1, source)
    until(lambda: port.of(Kind.OFFER))
    polls = port.polls
    until(lambda: port.polls > polls + 20)
    assert source.views == 0


def test_memory_is_not_released_while_mpi_reads_it(link: Link, port: FakePort) -> None:
    port.hold = True
    transfer = offer(link)
    for chunk, _ in LAYOUT.sends(0):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=chunk)
    until(lambda: port.payloads)
    port.say(Kind.DECLINED, step=1, body={"reason": "rank 1: busy"})
    assert transfer.settled.wait(SECONDS_MAX)
    assert (transfer.state, transfer.reason) == (TransferState.DECLINED, "rank 1: busy")
    time.sleep(0.02)
    assert not transfer.released.is_set()
    port.hold = False
    assert transfer.released.wait(SECONDS_MAX)


def test_unused_credits_are_returned_when_a_checkpoint_ends(link: Link, port: FakePort) -> None:
    source = Source(0)
    source.ready = 0
    transfer = offer(link, 1, source)
    port.say(Kind.CREDIT, step=1, chunk=0, arg=3)
    until(lambda: transfer.state is TransferState.SENDING)
    port.say(Kind.FAILED, step=1, body={"code": "peer_lost", "message": "rank 1 is dead"})
    assert transfer.released.wait(SECONDS_MAX)
    until(lambda: port.of(Kind.RETURN))
    assert (port.of(Kind.RETURN)[0].step, port.of(Kind.RETURN)[0].chunk) == (1, 0)
    assert transfer.state is TransferState.FAILED
    # One that was on its way when it ended, and one for a step that this rank never heard of.
    port.say(Kind.CREDIT, step=1, chunk=1, arg=4)
    port.say(Kind.CREDIT, step=77, chunk=0, arg=5)
    until(lambda: len(port.of(Kind.RETURN)) == 3)
    assert not port.payloads


def test_a_verdict_may_come_before_the_offer(link: Link, port: FakePort) -> None:
    port.say(Kind.DECLINED, step=1, body={"reason": "rank 1: busy", "new_pickle_reserve_bytes": 131072})
    until(lambda: link.new_pickle_reserve_bytes == 131072)
    transfer = offer(link)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.DECLINED
    assert not port.of(Kind.OFFER)


def test_a_declined_offer_is_taken_back(link: Link, port: FakePort) -> None:
    transfer = offer(link)
    link.decline(1, "copy failed: no memory")
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.DECLINED
    until(lambda: port.of(Kind.DECLINE))
    assert port.of(Kind.DECLINE)[0].body == b"copy failed: no memory"


def test_an_outgrown_pickle_says_what_it_needs(link: Link, port: FakePort) -> None:
    link.decline(3, "outgrown", needed_pickle_bytes=99)
    until(lambda: port.of(Kind.DECLINE))
    assert (port.of(Kind.DECLINE)[0].step, port.of(Kind.DECLINE)[0].arg) == (3, 99)


@pytest.mark.parametrize("again", [1, 0])
def test_a_step_that_is_not_new_is_declined_here(link: Link, port: FakePort, again: int) -> None:
    offer(link)
    transfer = offer(link, again)
    assert transfer.released.is_set()
    assert "not above step 1" in transfer.reason
    until(lambda: port.of(Kind.OFFER))
    assert len(port.of(Kind.OFFER)) == 1


def test_an_offer_without_a_layout_is_an_error(port: FakePort) -> None:
    link = make(port)
    with pytest.raises(StateError, match="before a layout"):
        offer(link)
    link.close(seconds_max=0.0)


def _agree(link: Link, port: FakePort, kind: Kind, body: dict[str, Any]) -> Agreement:
    def answer() -> None:
        until(lambda: port.of(Kind.PROPOSE))
        port.say(kind, body=body)

    threading.Thread(target=answer).start()
    return link.agree(Proposal("digest", [["a", "float32", [1], -1]], 10, {"rng": 5}))


def test_agreement(link: Link, port: FakePort) -> None:
    body = {"pickle_reserve_bytes": 65536, "per_rank_reserve_bytes": {"rng": 4096}}
    assert _agree(link, port, Kind.RESERVED, body) == Agreement(65536, {"rng": 4096})
    assert Proposal.from_frame(port.of(Kind.PROPOSE)[0]).per_rank_bytes == {"rng": 5}


def test_a_refused_layout_is_the_users_error_and_the_link_goes_on(link: Link, port: FakePort) -> None:
    body = {"code": "state", "message": "rank 1: tensor a: expected float32, got float16"}
    with pytest.raises(StateError, match="rank 1: tensor a"):
        _agree(link, port, Kind.REFUSED, body)
    assert link.problem is None


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
    assert len([r for r in caplog.records if "NO MORE CHECKPOINTS" in r.getMessage()]) == 1
    link.close(seconds_max=SECONDS_MAX)
    assert port.left


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
    assert any("step 1 is" in record.getMessage() for record in caplog.records)


def test_the_thread_ends_with_the_link(port: FakePort) -> None:
    link = make(port)
    link.close(seconds_max=0.0)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "holdfast-link"])


def test_each_beat_is_answered(link: Link, port: FakePort) -> None:
    for _ in range(3):
        port.say(Kind.BEAT)
    until(lambda: len(port.of(Kind.BEAT)) == 3)
    assert all(frame.attempt == 1 for frame in port.of(Kind.BEAT))
    assert not Kind.BEAT.from_stager


def test_done_carries_the_fingerprints_and_the_record_does_not(link: Link, port: FakePort) -> None:
    source = Source(0)
    source.ready = 0
    transfer = offer(link, 1, source)
    for chunk, _ in LAYOUT.sends(0):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=chunk)
    transfer.fingerprints = "AAAA"
    source.ready = area_bytes(LAYOUT, 0)
    until(lambda: port.of(Kind.DONE))
    assert wire.json_body(port.of(Kind.DONE)[0])["replicas"] == "AAAA"
    assert "replicas" not in transfer.record
    assert transfer.frames_left == 0
    assert transfer.frames == len(list(LAYOUT.sends(0)))


def test_an_answer_is_known_before_the_offer(link: Link, port: FakePort) -> None:
    assert link.answer(7) is None
    port.say(Kind.DECLINED, step=7, body={"reason": "rank 1: busy: still sending"})
    until(lambda: link.answer(7))
    assert link.answer(7) == ("rank 1: busy: still sending", "")


def test_a_verdict_keeps_the_code_of_its_error(link: Link, port: FakePort) -> None:
    transfer = offer(link)
    until(lambda: port.of(Kind.OFFER))
    port.say(Kind.FAILED, step=1, body={"code": "state", "message": "step 1: replicas"})
    assert transfer.ended.wait(SECONDS_MAX)
    assert (transfer.code, transfer.reason) == ("state", "step 1: replicas")


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
    assert "without the stager nobody brings the ranks to one step" in caplog.text
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
    assert (link.schedule.phase, link.schedule.every) == (Phase.PACED, 5)


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
