"""The flusher's loop ends when all work is done, at whichever moment the last piece ends."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flusher.flusher_context import FlusherContext
from flusher.retention import RetentionPolicy
from flusher.service import FlusherService
from flusher.verify_and_prune import Maintenance, MaintenanceRules
from flusher.workers import Inbox
from flusher.writer_lease import MemberLease, WriterLease
from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease, read_failure_count
from holdfast.checkpoints.share_records import ShareRecords
from holdfast.config import FlusherConfig
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX, WHOLE, ShareNumber
from holdfast.ring.doorbell import SOCKET_NAME, VERSION, Channel, Listener, Message, connect
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.telemetry.events import EventLog
from holdfast.wire.failure_count import FailureCount
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore

SECONDS_MAX = 60


class LateMaintenance(Maintenance):
    """Reading back ends just after the loop has looked whether it has, and its last word is taken in the same turn."""

    service: FlusherService
    _over = False

    @property
    def idle(self) -> bool:
        return self._over

    def set_busy(self, busy: bool) -> None:
        super().set_busy(busy)
        self._over = self.service._handler is not None and self.service._handler.finishing


def test_work_that_ends_between_two_looks_does_not_leave_the_loop_asleep(tmp_path: Path) -> None:
    store = MemoryStore()
    config = FlusherConfig(store="memory://run", chunk_bytes=4096, ring_bytes=8 * 4096, grace_seconds=0)
    said: list[str] = []
    with contextlib.ExitStack() as held:
        ring = Ring.create(tmp_path / "run", chunk_bytes=4096, ring_chunks=8, attempt=1)
        held.callback(ring.close)
        inbox = Inbox()
        held.callback(inbox.close)
        lease = WriterLease(store, config.heartbeat_seconds)
        held.callback(lease.end)
        context = FlusherContext(store, lease, inbox, EventLog(None, role="flusher"))
        maintenance = LateMaintenance(context, MaintenanceRules(verify=False, keep=RetentionPolicy(0)))
        held.callback(maintenance.stop)
        listener = Listener(tmp_path / "run" / SOCKET_NAME)
        held.callback(listener.close)
        service = FlusherService(
            config,
            ring,
            context,
            maintenance=maintenance,
            listener=listener,
        )
        maintenance.service = service

        def stager() -> None:
            channel = connect(tmp_path / "run" / SOCKET_NAME)
            channel.send("hello", version=VERSION, pid=1, attempt=0, share=[0, 1], lead_attempt=0)
            deadline = time.monotonic() + SECONDS_MAX
            while "drained" not in said and time.monotonic() < deadline and not channel.closed:
                for message in channel.poll():
                    said.append(message.kind)
                    if message.kind == "welcome":
                        channel.send("finish")
                        threading.Timer(0.2, inbox.put, [None]).start()  # the read-back's last word
                time.sleep(0.01)
            channel.close()  # would wake a loop that is asleep, but then nobody was told `drained`

        thread = threading.Thread(target=stager)
        thread.start()
        service.run()
        thread.join()
    assert said == ["welcome", "drained"]


class Bench:
    """A service on the ring of a dead flusher, with one checkpoint that is being received."""

    def __init__(
        self,
        directory: Path,
        held: contextlib.ExitStack,
        *,
        adopted: bool = True,
        store: MemoryStore | None = None,
        share: ShareNumber = WHOLE,
    ) -> None:
        self.store = store or MemoryStore()
        self.directory = directory
        layout = made_up(3, entries=3, chunk_bytes=4096, ranks=1, entry_bytes_max=5000).layout
        self.ring = Ring.create(directory, chunk_bytes=4096, ring_chunks=8, attempt=1)
        held.callback(self.ring.close)
        if adopted:
            self.ring.write_checkpoint(1, 7, "receiving", self.ring.put_layout(layout), {})
            self.ring.mark_filling(2, 1, 7, 0)
        config = FlusherConfig(
            store="memory://run", chunk_bytes=4096, ring_bytes=8 * 4096, grace_seconds=0, share=share
        )
        inbox = Inbox()
        held.callback(inbox.close)
        lease = WriterLease(self.store, config.heartbeat_seconds) if share.is_lead else MemberLease()
        held.callback(lease.end)
        context = FlusherContext(self.store, lease, inbox, EventLog(None, role="flusher"), share=share)
        maintenance = Maintenance(context, MaintenanceRules(verify=False, keep=RetentionPolicy(0)))
        held.callback(maintenance.stop)
        listener = Listener(directory / SOCKET_NAME)
        held.callback(listener.close)
        self.service = FlusherService(
            config,
            self.ring,
            context,
            maintenance=maintenance,
            listener=listener,
            adopted=adopted,
        )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("flusher.service._OLD_STAGER_SECONDS_MIN", 0.05)
    monkeypatch.setattr("flusher.service._HANG_CHECK_SECONDS", 0.05)
    monkeypatch.setattr("flusher.service._DYING_SECONDS", 0.05)
    with contextlib.ExitStack() as held:
        yield Bench(tmp_path / "run", held)


def stand_still(ring: Ring, held: contextlib.ExitStack) -> Ring:
    """Simulate a stager that maps the ring and stays silent."""
    mapped = held.enter_context(Ring.attach(ring.directory))
    mapped.hold(1)
    return mapped


def test_the_slots_of_a_stager_that_stands_still_are_its_own_until_it_is_dead(bench: Bench) -> None:
    seen: list[SlotState] = []
    with contextlib.ExitStack() as held:
        stager = stand_still(bench.ring, held)

        def die() -> None:
            seen.append(bench.ring.state(2))
            stager.release()

        threading.Timer(0.5, die).start()  # ten times as long as a stager that says nothing is waited for
        bench.service.run()
    assert seen == [SlotState.FILLING]
    assert bench.ring.state(2) is SlotState.FREE
    assert bench.ring.checkpoint_ids() == []


def test_another_job_is_refused_while_the_stager_before_may_still_write(bench: Bench) -> None:
    said: list[tuple[str, str]] = []
    with contextlib.ExitStack() as held:
        stager = stand_still(bench.ring, held)

        def other_job() -> None:
            channel = connect(bench.directory / SOCKET_NAME)
            channel.send("hello", version=VERSION, pid=1, attempt=0, share=[0, 1], lead_attempt=0)
            deadline = time.monotonic() + SECONDS_MAX
            while not channel.closed and time.monotonic() < deadline:
                said.extend((m.kind, m.fields.get("message", "")) for m in channel.poll())
                time.sleep(0.01)
            said.append((bench.ring.state(2).name, ""))
            channel.close()
            stager.release()

        thread = threading.Thread(target=other_job)
        thread.start()
        bench.service.run()
        thread.join()
    assert [kind for kind, _ in said] == ["refused", "FILLING"]
    assert "still uses the ring" in said[0][1]


def test_told_to_end_it_leaves_what_is_being_received_to_the_next_flusher(bench: Bench) -> None:
    with contextlib.ExitStack() as held:
        stand_still(bench.ring, held)
        before = signal.getsignal(signal.SIGTERM)

        def tell() -> None:
            deadline = time.monotonic() + SECONDS_MAX
            while signal.getsignal(signal.SIGTERM) == before and time.monotonic() < deadline:
                time.sleep(0.01)  # else it would end the tests
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=tell).start()
        bench.service.run()
        assert bench.service.leaves_ring
    assert bench.ring.state(2) is SlotState.FILLING
    assert bench.ring.checkpoint_ids() == [(1, 7)]


def test_told_to_end_with_a_dead_stager_it_leaves_nothing(bench: Bench) -> None:
    bench.service._on_signal(signal.SIGTERM, None)
    bench.service.run()
    assert not bench.service.leaves_ring
    assert bench.ring.checkpoint_ids() == []


@pytest.mark.parametrize(
    ("end", "failures"), [("left", 0), ("interrupted", 1), ("gone", 1), ("nothing begun", 0)]
)
def test_the_claim_counts_a_job_by_its_end(tmp_path: Path, end: str, failures: int) -> None:
    with contextlib.ExitStack() as held:
        bench = Bench(tmp_path / "run", held, adopted=False)
        layout = made_up(3, entries=3, chunk_bytes=4096, ranks=1, entry_bytes_max=5000).layout
        digest = bench.ring.put_layout(layout)

        def stager() -> None:
            channel = connect(bench.directory / SOCKET_NAME)
            channel.send("hello", version=VERSION, pid=1, attempt=0, share=[0, 1], lead_attempt=0)
            said = await_kinds(channel, "welcome")
            assert said[0].fields["seen"] == {"failures": 0, "seconds": 0.0}
            if end != "nothing begun":
                channel.send("begin", attempt=1, step=9, layout_digest=digest)
                await_kinds(channel, "began")
            if end in {"left", "interrupted"}:
                channel.send("finish", interrupted=end == "interrupted")
                await_kinds(channel, "drained")
            channel.close()

        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(stager)
            bench.service.run()
            ended.result(SECONDS_MAX)
    assert read_failure_count(bench.store).failures == failures
    assert (read_failure_count(bench.store).seconds > 0) == (end != "nothing begun")


def test_a_job_that_goes_on_under_the_next_flusher_is_not_counted_as_lost(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        store = MemoryStore()
        dead = Lease.acquire(store, identity=dataclasses.replace(Identity.of_this_process(), started=1))
        dead.begin_work()
        dead.release()
        bench = Bench(tmp_path / "run", held, store=store)
        stager = stand_still(bench.ring, held)

        def resume() -> dict[str, object]:
            channel = connect(bench.directory / SOCKET_NAME)
            channel.send("hello", version=VERSION, pid=1, attempt=1, share=[0, 1], lead_attempt=0)
            welcome = await_kinds(channel, "welcome")[0]
            channel.send("finish", interrupted=False)
            await_kinds(channel, "drained")
            stager.release()
            return dict(welcome.fields)

        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(resume)
            bench.service.run()
        welcome = said.result(SECONDS_MAX)
        assert welcome["resumed"]
        assert FailureCount.from_json(welcome["seen"]).failures == 0
    assert read_failure_count(store).failures == 0


def await_kinds(channel: Channel, kind: str, *, most: float = math.inf) -> list[Message]:
    """The flusher's messages up to the first one of this kind, read `most` at a time."""
    said: list[Message] = []
    deadline = time.monotonic() + SECONDS_MAX
    while all(message.kind != kind for message in said):
        assert time.monotonic() < deadline, said
        assert not channel.closed, said
        said += channel.poll(most=most)
        time.sleep(0.01)
    return said


class HungUp:
    """A stager that breaks the protocol while it fills a slot, and then lives on."""

    def __init__(self, bench: Bench, held: contextlib.ExitStack) -> None:
        self.bench = bench
        self.mapped = stand_still(bench.ring, held)
        channel = self.attach()
        channel.send("drained")  # no word of a stager's
        self.await_end(channel)

    def attach(self) -> Channel:
        channel = connect(self.bench.directory / SOCKET_NAME)
        channel.send("hello", version=VERSION, pid=os.getpid(), attempt=1, share=[0, 1], lead_attempt=0)
        return channel

    def await_end(self, channel: Channel) -> list[Message]:
        said: list[Message] = []
        deadline = time.monotonic() + SECONDS_MAX
        while not channel.closed and time.monotonic() < deadline:
            said += channel.poll()
            time.sleep(0.01)
        assert channel.closed
        return said


def test_a_living_stager_that_was_hung_up_on_keeps_its_slots_and_comes_back(bench: Bench) -> None:
    seen: list[SlotState] = []
    said: list[Message] = []

    def act() -> None:
        with contextlib.ExitStack() as held:
            stager = HungUp(bench, held)
            time.sleep(0.5)  # longer than the flusher waits between two looks
            seen.append(bench.ring.state(2))
            channel = stager.attach()
            deadline = time.monotonic() + SECONDS_MAX
            while not said and time.monotonic() < deadline:
                said.extend(channel.poll())
                time.sleep(0.01)
            seen.append(bench.ring.state(2))
            channel.send("finish")
            said.extend(stager.await_end(channel))

    thread = threading.Thread(target=act)
    thread.start()
    bench.service.run()
    thread.join()
    assert seen == [SlotState.FILLING] * 2
    assert [message.kind for message in said] == ["welcome", "drained"]
    assert said[0].fields["resumed"]
    assert said[0].fields["attempt"] == 1


def test_a_stager_that_was_hung_up_on_and_dies_leaves_its_slots(bench: Bench) -> None:
    seen: list[SlotState] = []

    def act() -> None:
        with contextlib.ExitStack() as held:
            stager = HungUp(bench, held)
            time.sleep(0.5)
            seen.append(bench.ring.state(2))
            stager.mapped.release()

    thread = threading.Thread(target=act)
    thread.start()
    bench.service.run()
    thread.join()
    assert seen == [SlotState.FILLING]
    assert bench.ring.state(2) is SlotState.FREE
    assert bench.ring.checkpoint_ids() == []


class MemberBench(Bench):
    """A service with share 2/2, whose lead never begins: everything that it has to say is in the store."""

    share, key = ShareNumber(1, 2), CheckpointId(3, 9)

    def __init__(self, directory: Path, held: contextlib.ExitStack) -> None:
        super().__init__(directory, held, adopted=False, share=self.share)
        self.image = made_up(3, entries=20, chunk_bytes=4096, ranks=1, entry_bytes_max=5000)
        self.layout = self.image.layout
        assert self.layout.chunks > 1

    def voided(self) -> str:
        void = ShareRecords(self.store, self.key).void()
        return "" if void is None else void.reason

    def hello(self, *, standing: bool = True, lead_attempt: int = 3) -> Channel:
        channel = connect(self.directory / SOCKET_NAME)
        hello = {"version": VERSION, "pid": 1, "attempt": 0, "lead_attempt": lead_attempt}
        channel.send("hello", **hello, share=[self.share.index, self.share.writers], standing=standing)
        (welcome,) = await_kinds(channel, "welcome", most=1)
        assert not welcome.fields["resumed"]
        self.attempt = welcome.fields["attempt"]
        return channel

    def begin(self, channel: Channel, step: int = 9) -> None:
        digest = self.ring.put_layout(self.layout)
        self.ring.write_checkpoint(self.key.attempt, step, "receiving", digest, {})
        channel.send("begin", attempt=self.key.attempt, step=step, layout_digest=digest)

    def lose(self, channel: Channel) -> None:
        """The stager has begun the step, and dies in the middle of a chunk."""
        self.begin(channel)
        self.ring.mark_filling(2, *self.key, self.layout.chunks - 1)
        channel.close()
        deadline = time.monotonic() + SECONDS_MAX
        while self.ring.state(2) is not SlotState.FREE and time.monotonic() < deadline:
            time.sleep(0.01)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts: an image of a few chunks then has two shares."""
    monkeypatch.setattr("flusher.engine.part_chunks_for", lambda *_: 1)


def play(directory: Path, act: Callable[[Any], None], kind: type[MemberBench] = MemberBench) -> MemberBench:
    with contextlib.ExitStack() as held, ThreadPoolExecutor(1) as pool:
        bench = kind(directory, held)
        acted = pool.submit(act, bench)
        bench.service.run()
        acted.result(SECONDS_MAX)
        assert bench.ring.checkpoint_ids() == []
    return bench


@pytest.mark.usefixtures("small_parts")
def test_the_next_stager_of_a_share_begins_the_same_step_again(tmp_path: Path) -> None:
    def act(bench: MemberBench) -> None:
        bench.lose(bench.hello())
        assert not bench.voided()
        channel = bench.hello()
        bench.begin(channel)
        channel.send("abort", attempt=3, step=9, reason="a rank is gone")
        assert "a rank is gone" in await_kinds(channel, "failed")[-1].fields["message"]
        channel.send("finish")
        await_kinds(channel, "drained")
        channel.close()

    assert "a rank is gone" in play(tmp_path / "run", act).voided()


@pytest.mark.usefixtures("small_parts")
def test_a_share_whose_stager_does_not_come_again_is_given_up_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flusher.service.LOST_STAGER_SECONDS_MAX", 0.3)
    bench = play(tmp_path / "run", lambda bench: bench.lose(bench.hello()))
    assert "no stager came back" in bench.voided()


@pytest.mark.usefixtures("small_parts")
def test_a_share_is_given_up_when_the_next_stager_is_of_another_attempt(tmp_path: Path) -> None:
    def act(bench: MemberBench) -> None:
        bench.lose(bench.hello())
        channel = bench.hello(lead_attempt=4)
        channel.send("finish")
        await_kinds(channel, "drained")
        channel.close()

    assert "another job began" in play(tmp_path / "run", act).voided()


@pytest.mark.usefixtures("small_parts")
def test_a_share_of_a_stager_that_is_never_started_again_is_given_up_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    bench = play(tmp_path / "run", lambda bench: bench.lose(bench.hello(standing=False)))
    assert "the stager (process" in bench.voided()
    assert time.monotonic() - begun < LOST_STAGER_SECONDS_MAX / 2


class LeadBench(MemberBench):
    """A service with share 1/2."""

    share, key = ShareNumber(0, 2), CheckpointId(1, 9)

    def hello(self, *, standing: bool = True, lead_attempt: int = 0) -> Channel:
        return super().hello(standing=standing, lead_attempt=lead_attempt)

    def free_slot(self) -> int:
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            for slot in range(self.ring.ring_chunks):
                if self.ring.state(slot) is SlotState.FREE:
                    return slot
            time.sleep(0.01)
        raise AssertionError("no slot becomes free")

    def finish(self, channel: Channel) -> None:
        channel.send("finish")
        await_kinds(channel, "drained")
        channel.close()


@pytest.mark.usefixtures("small_parts")
def test_the_next_stager_that_leads_begins_the_same_step_of_the_same_attempt_again(tmp_path: Path) -> None:
    def act(bench: LeadBench) -> None:
        bench.lose(bench.hello())
        assert not bench.voided()
        channel = bench.hello(lead_attempt=1)
        assert bench.attempt == 1
        bench.begin(channel)
        channel.send("abort", attempt=1, step=9, reason="a rank is gone")
        assert "a rank is gone" in await_kinds(channel, "failed")[-1].fields["message"]
        bench.finish(channel)

    bench = play(tmp_path / "run", act, LeadBench)
    assert read_failure_count(bench.store) == FailureCount(0, read_failure_count(bench.store).seconds)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("standing", [True, False])
def test_a_step_whose_lead_does_not_come_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standing: bool
) -> None:
    monkeypatch.setattr("flusher.service.LOST_STAGER_SECONDS_MAX", 0.3)
    bench = play(tmp_path / "run", lambda bench: bench.lose(bench.hello(standing=standing)), LeadBench)
    assert read_failure_count(bench.store).failures == 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("lead_attempt", [0, 7])
def test_a_lead_that_does_not_name_the_attempt_of_the_ring_begins_another_one(
    tmp_path: Path, lead_attempt: int
) -> None:
    def act(bench: LeadBench) -> None:
        bench.lose(bench.hello())
        channel = bench.hello(lead_attempt=lead_attempt)
        assert bench.attempt == 2
        bench.finish(channel)

    play(tmp_path / "run", act, LeadBench)


def test_the_next_stager_hears_which_steps_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As large as the image, which the lead then writes alone.
    monkeypatch.setattr("flusher.engine.part_chunks_for", lambda *_: 100)

    def act(bench: LeadBench) -> None:
        channel, image = bench.hello(), bench.image
        bench.begin(channel)
        for chunk in range(image.layout.chunks):
            data, slot = image.chunk_bytes(chunk), bench.free_slot()
            bench.ring.mark_filling(slot, *bench.key, chunk)
            bench.ring.slot_memory(slot)[: len(data)] = data
            bench.ring.mark_full(slot, image.sources(chunk), len(data))
            channel.send("chunk", slot=slot)
        bench.ring.write_checkpoint(*bench.key, "staged", image.layout.digest, {})
        channel.send("staged", attempt=1, step=9)
        await_kinds(channel, "durable")
        bench.begin(channel, 10)
        channel.close()
        channel = bench.hello(lead_attempt=1)
        durable = await_kinds(channel, "durable", most=1)[-1]
        assert (durable.fields["attempt"], durable.fields["step"]) == (1, 9)
        bench.finish(channel)

    play(tmp_path / "run", act, LeadBench)
