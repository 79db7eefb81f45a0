"""One of several stagers: the slots that it fills, its messages to the flusher, and work without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import PeerLost
from holdfast.image.shares import ShareNumber
from holdfast.net.handshake import Hello
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.welcome import Welcome
from stager import service
from stager.standing import _share_mismatch
from tests.unit.stager.bench import LAYOUT, Bench

Make = Callable[..., Bench]
LEAD, MEMBER = ShareNumber(0, 2), ShareNumber(1, 2)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    benches: list[Bench] = []

    def make(share: ShareNumber, before: Callable[[Ring], None] = lambda _: None) -> Bench:
        benches.append(Bench(tmp_path, monkeypatch, share=share, before=before))
        benches[0].welcome_all()
        return benches[0]

    yield make
    for bench in benches:
        bench.close()


def test_the_ring_has_the_chunks_of_the_share_and_the_flusher_hears_that_it_is_staged(make: Make) -> None:
    bench = make(MEMBER)
    bench.offer_all()
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.pay_all()
    full = [record.chunk for record in bench.ring.records() if record.state is SlotState.FULL]
    assert sorted(full) == [2, 3]
    assert sorted(bench.heard) == ["begin", "chunk", "chunk", "staged"]


def test_a_rank_that_declines_a_staged_step_takes_the_share_back(make: Make) -> None:
    bench = make(MEMBER)
    bench.offer_all()
    bench.pay_all()
    bench.port.say(1, Kind.DECLINE, step=1, body=b"late: stager 1/2 has failed")
    bench.turn()
    assert bench.heard[-1] == "abort"
    assert [rank for rank, _ in bench.port.told(Kind.DECLINED)] == [0, 1]


def _appoint(bench: Bench) -> int:
    """A rank gets a notice; return the step that all ranks are to save."""
    notice = {"kind": "terminate", "seconds_left": 100.0, "source": "aws", "said_by": "", "rank": -1}
    bench.port.say(1, Kind.NOTICE, body=wire.to_json(notice))
    bench.turn()
    for _ in range(2):
        asked = bench.port.told(Kind.SAVE_AT)[-1][1]
        for rank in range(2):
            bench.port.say(rank, Kind.AT, step=5, arg=asked.arg, body=wire.to_json({"step_seconds": 0.05}))
        bench.turn()
    return bench.port.told(Kind.SAVE_AT)[-1][1].step


@pytest.mark.parametrize("by", ["rank 0", "the flusher"])
def test_after_a_notice_a_step_is_staged_once_every_stager_has_staged_its_share(make: Make, by: str) -> None:
    bench = make(LEAD)
    step = _appoint(bench)
    bench.offer_all(step)
    bench.pay_all(step)
    assert bench.happened("staged")
    assert not bench.happened("emergency_staged")
    if by == "rank 0":
        bench.port.say(0, Kind.ALL_STAGED, step=step)
    else:
        bench.flusher.send("durable", attempt=3, step=step, file="f", pgt2_seconds=1.0, record={})
    bench.turn()
    assert [one["saved_step"] for one in bench.happened("emergency_staged")] == [step]


def test_after_a_notice_another_step_is_named_if_another_share_fails(make: Make) -> None:
    bench = make(LEAD)
    step = _appoint(bench)
    bench.offer_all(step)
    bench.pay_all(step)
    asked = len(bench.port.told(Kind.SAVE_AT))
    bench.port.say(1, Kind.DECLINE, step=step, body=b"late: stager 2/2 has failed")
    bench.turn()
    assert len(bench.port.told(Kind.SAVE_AT)) > asked
    assert not bench.happened("emergency_staged")


def test_only_rank_0_says_that_all_shares_are_staged(make: Make) -> None:
    bench = make(LEAD)
    bench.port.say(1, Kind.ALL_STAGED, step=1)
    bench.turn()
    assert bench.service.lost_ranks == {1}


def test_welcome_says_which_share_it_is(make: Make) -> None:
    bench = make(MEMBER)
    bench.port.say(0, Kind.HELLO, attempt=0, body=wire.to_json({"host": "a", "pid": 1}))
    bench.turn()
    ((_, frame),) = bench.port.told(Kind.WELCOME)
    welcome = Welcome.from_frame(frame)
    assert (welcome.share, welcome.shares) == (2, 2)


def test_a_lead_whose_ring_could_not_be_kept_ends_the_job(make: Make) -> None:
    bench = make(LEAD)
    bench.kill_flusher()
    bench.resumes, bench.attach_error = False, None
    bench.now += 60
    with pytest.raises(PeerLost, match="another attempt than the other stagers"):
        bench.until("flusher_replaced")


def test_a_member_whose_ring_could_not_be_kept_goes_on_with_the_attempt_of_the_lead(make: Make) -> None:
    bench = make(MEMBER)
    bench.kill_flusher()
    bench.resumes, bench.attach_error = False, None
    bench.now += 60
    bench.until("flusher_replaced")
    bench.port.sent.clear()
    bench.offer_all(step=2)
    bench.flusher.send("began", attempt=3, step=2, part_chunks=1)
    bench.pay_all(step=2)
    assert [rank for rank, _ in bench.port.told(Kind.STAGED)] == [0, 1]


def test_a_member_waits_at_the_end_for_no_one_who_may_never_publish(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(MEMBER)
    monkeypatch.setattr(service, "is_ring_kept", lambda _: True)
    bench.offer_all()
    bench.pay_all()
    for rank in range(2):
        bench.port.say(rank, Kind.BYE, attempt=0)
    bench.service.run()
    bench.heard += [message.kind for message in bench.flusher.poll()]
    assert "finish" not in bench.heard


def test_the_next_process_of_a_member_says_what_the_one_before_had_staged(make: Make) -> None:
    def before(ring: Ring) -> None:
        ring.write_checkpoint(3, 1, "staged", ring.put_layout(LAYOUT), {})

    bench = make(MEMBER, before)
    bench.offer_all()
    assert [rank for rank, _ in bench.port.told(Kind.STAGED)] == [0, 1]
    assert not bench.port.credits()
    bench.kill_flusher()
    bench.next_flusher()
    assert not bench.heard, "the next flusher finds it in the ring"


def test_the_next_flusher_hears_of_the_chunks_that_the_stager_before_had_received(make: Make) -> None:
    def before(ring: Ring) -> None:
        ring.write_checkpoint(3, 1, "receiving", ring.put_layout(LAYOUT), {})
        ring.mark_filling(7, 3, 1, 2)
        sources = [(rank, 0) for rank in LAYOUT.senders(2)]
        ring.mark_full(7, sources, LAYOUT.chunk_extent(2).nbytes)

    bench = make(MEMBER, before)
    bench.offer_all()
    bench.flusher.send("began", attempt=3, step=1, part_chunks=1)
    bench.pay_all()
    bench.kill_flusher()
    bench.next_flusher()
    assert sorted(bench.heard) == ["begin", "chunk", "chunk", "chunk", "staged"]


def _written(ring: Ring) -> None:
    """The stager before has received step 1, and the flusher has written it."""
    ring.mark_filling(7, 3, 1, 0)
    sources = [(rank, 0) for rank in LAYOUT.senders(0)]
    ring.mark_full(7, sources, LAYOUT.chunk_extent(0).nbytes)
    ring.free(7)


def test_the_next_process_of_a_lead_says_what_became_durable_before_it_came(make: Make) -> None:
    bench = make(LEAD, _written)
    fields = {"file": "step-000000001.pt", "pgt2_seconds": 1.0, "record": {}}
    bench.flusher.send("durable", attempt=3, step=1, **fields)
    bench.turn()
    bench.port.sent.clear()
    bench.offer_all()
    assert [rank for rank, _ in bench.port.told(Kind.DURABLE)] == [0, 1]
    assert not bench.heard


def test_the_next_process_of_a_lead_begins_no_step_that_has_ended(make: Make) -> None:
    bench = make(LEAD, _written)
    bench.offer_all()
    declined = bench.port.told(Kind.DECLINED)
    assert [rank for rank, _ in declined[:2]] == [0, 1]
    assert "has ended while the stager was lost" in declined[0][1].body.decode()
    assert not bench.heard
    bench.offer_all(step=2)
    assert "begin" in bench.heard


@pytest.mark.parametrize(
    ("share", "lead_attempt", "generation", "words"),
    [
        (LEAD, 0, 0, ""),
        (LEAD, 3, 1, ""),
        (MEMBER, 3, 0, ""),
        (ShareNumber(0, 1), 0, 0, ""),
        (MEMBER, 0, 1, "share 2/2 for the first stager"),
        (LEAD, 3, 0, "share 1/2 for one after the first"),
    ],
)
def test_a_stager_that_is_taken_for_another_one_says_so(
    share: ShareNumber, lead_attempt: int, generation: int, words: str
) -> None:
    hello = Hello(0, 2, 0, "launch", bytes(16), bytes(32), generation=generation, lead_attempt=lead_attempt)
    refusal = _share_mismatch(share, hello)
    assert (refusal is None) == (not words)
    assert words in str(refusal)
