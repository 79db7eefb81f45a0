"""Checkpoints from offer to durable, and the effect of a verdict at any time."""

from __future__ import annotations

from holdfast.crc import crc32
from holdfast.image.layout import Layout
from holdfast.image.slices import frames_of
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from tests.unit.trainer_side.stager_port import LAYOUT, SECONDS_MAX, FakePort, Source, offer, until
from trainer_side.link.link import Link
from trainer_side.transfer import TransferState


def test_a_checkpoint_from_offer_to_durable(link: Link, port: FakePort) -> None:
    source = Source(0)
    transfer = offer(link, 1, source)
    until(lambda: port.of(Kind.OFFER))
    assert Layout.from_bytes(port.of(Kind.LAYOUT)[0].body) == LAYOUT
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
    assert (transfer.state, link.job.staged_step, link.job.durable_step) == (TransferState.STAGED, 1, -1)
    port.say(Kind.DURABLE, step=1)
    assert transfer.ended.wait(SECONDS_MAX)
    assert link.job.durable_step == 1
    assert {
        "sending_seconds",
        "sent_seconds",
        "staged_seconds",
        "durable_seconds",
    } <= transfer.record.to_json().keys()


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
    port.say(
        Kind.DECLINED,
        step=1,
        body={"reason": "rank 1: busy", "cause": "busy", "new_pickle_reserve_bytes": 131072},
    )
    until(lambda: link.job.new_pickle_reserve_bytes == 131072)
    transfer = offer(link)
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.DECLINED
    assert not port.of(Kind.OFFER)


def test_a_declined_offer_is_taken_back(link: Link, port: FakePort) -> None:
    transfer = offer(link)
    link.decline(1, DeclineCause.COPY_FAILED.because("no memory"))
    assert transfer.released.wait(SECONDS_MAX)
    assert transfer.state is TransferState.DECLINED
    until(lambda: port.of(Kind.DECLINE))
    assert port.of(Kind.DECLINE)[0].body == b"copy failed: no memory"


def test_an_answer_is_known_before_the_offer(link: Link, port: FakePort) -> None:
    assert link.decline_reason(7) is None
    port.say(Kind.DECLINED, step=7, body={"reason": "rank 1: busy: still sending", "cause": "busy"})
    until(lambda: link.decline_reason(7))
    assert link.decline_reason(7) == Reason("busy", "rank 1: busy: still sending")


def test_a_verdict_keeps_the_code_of_its_error(link: Link, port: FakePort) -> None:
    transfer = offer(link)
    until(lambda: port.of(Kind.OFFER))
    port.say(Kind.FAILED, step=1, body={"code": "state", "message": "step 1: replicas"})
    assert transfer.ended.wait(SECONDS_MAX)
    assert transfer.reason == Reason("the ranks' states differ", "step 1: replicas")
