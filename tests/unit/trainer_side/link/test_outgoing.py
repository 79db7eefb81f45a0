"""One outgoing checkpoint: the order of its frames, and when its memory is free."""

from __future__ import annotations

import time

from holdfast.crc import crc32
from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import area_bytes
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from tests.unit.trainer_side.stager_port import CHUNK, LAYOUT, SECONDS_MAX, FakePort, Source, offer, until
from trainer_side.link.link import Link
from trainer_side.transfer import TransferState


def test_a_frame_is_not_sent_before_it_is_copied(link: Link, port: FakePort) -> None:
    source = Source(0)
    first = next(iter(LAYOUT.sent_frames(0)))
    source.ready = sum(extent.nbytes for extent in first[1]) - 1
    offer(link, 1, source)
    for chunk, _ in LAYOUT.sent_frames(0):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=chunk)
    until(lambda: not port.inbox)
    time.sleep(0.02)
    assert not port.payloads
    source.ready += 1
    until(lambda: port.payloads)
    time.sleep(0.02)
    assert len(port.payloads) == 1


def test_crcs_are_computed_before_the_credits_come(link: Link, port: FakePort) -> None:
    source = Source(0)
    transfer = offer(link, 1, source)
    until(lambda: source.views == len(list(LAYOUT.sent_frames(0))))
    assert transfer.record.crc_seconds
    assert not port.payloads
    frames = list(LAYOUT.sent_frames(0))
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
    for chunk, _ in LAYOUT.sent_frames(0):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=chunk)
    until(lambda: port.payloads)
    port.say(Kind.DECLINED, step=1, body={"reason": "rank 1: busy"})
    assert transfer.settled.wait(SECONDS_MAX)
    assert (transfer.state, str(transfer.reason)) == (TransferState.DECLINED, "rank 1: busy")
    time.sleep(0.02)
    assert not transfer.released.is_set()
    port.hold = False
    assert transfer.released.wait(SECONDS_MAX)


def test_done_carries_the_fingerprints_and_the_record_does_not(link: Link, port: FakePort) -> None:
    source = Source(0)
    source.ready = 0
    transfer = offer(link, 1, source)
    for chunk, _ in LAYOUT.sent_frames(0):
        port.say(Kind.CREDIT, step=1, chunk=chunk, arg=chunk)
    transfer.fingerprints = "AAAA"
    source.ready = area_bytes(LAYOUT, 0)
    until(lambda: port.of(Kind.DONE))
    assert wire.json_body(port.of(Kind.DONE)[0])["replicas"] == "AAAA"
    assert "replicas" not in transfer.record.to_json()
    assert transfer.frames_left == 0
    assert transfer.frames == len(list(LAYOUT.sent_frames(0)))


def test_a_rank_without_frames_says_done_once_its_save_is_complete(link: Link, port: FakePort) -> None:
    small = Layout(CHUNK, CHUNK, 2, (Entry("a", 64, CHUNK - 128, REPLICATED, ()),))
    assert not small.frames[0]
    source = Source(0, small)
    source.ready = -1
    transfer = link.offer(1, source, SaveRecord(saved_at_unix=time.time()), small)
    until(lambda: port.of(Kind.OFFER))
    polls = port.polls
    until(lambda: port.polls > polls + 20)
    assert not port.of(Kind.DONE)
    transfer.fingerprints = "AAAA"
    source.ready = 0
    until(lambda: port.of(Kind.DONE))
    assert wire.json_body(port.of(Kind.DONE)[0])["replicas"] == "AAAA"
