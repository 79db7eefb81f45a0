"""Engines that write shares of one image into a store in memory: how long they wait, and what they leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from flusher import retry_queue
from flusher import share_polls as looks_module
from flusher.engine import Engine
from flusher.flusher_context import FlusherContext
from flusher.listener import DurableStep, FlushListener
from flusher.recovery import adopt_staged
from flusher.retention import RetentionPolicy
from flusher.verify_and_prune import Maintenance, MaintenanceRules, NoMaintenance
from flusher.workers import Inbox
from flusher.writer_lease import MemberLease, WriterLease
from holdfast.checkpoints.lease import Lease
from holdfast.checkpoints.share_records import ShareRecords
from holdfast.errors import HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import ShareNumber, Shares
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.store.base import SMALL_BYTES_MAX
from holdfast.store.concurrency import ConcurrencyLimit
from holdfast.store.guarded import guarded
from holdfast.telemetry.events import EventLog
from tests.support.events import read_events
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore

CHUNK_BYTES = 4096
DEADLINE_SECONDS = 60.0
IMAGE = made_up(3, entries=30, chunk_bytes=CHUNK_BYTES, ranks=2, entry_bytes_max=9000)
KEY = CheckpointId(1, 5)
FOLDER = ".holdfast/shares/a000001-s000000005."


class Heard(FlushListener):
    """Records the outcome."""

    def __init__(self) -> None:
        self.durables: list[DurableStep] = []
        self.failures: list[HoldfastError] = []

    def durable(self, key: CheckpointId, durable: DurableStep) -> None:
        self.durables.append(durable)

    def failed(self, key: CheckpointId, error: HoldfastError) -> None:
        self.failures.append(error)


class Writer:
    """The flusher of one share, without a process."""

    def __init__(self, directory: Path, store: MemoryStore, index: int, writers: int = 2) -> None:
        directory.mkdir()
        self.number = ShareNumber(index, writers)
        self.chunks = Shares.of(IMAGE.layout, writers, 1).chunks_of(index)
        self.ring = Ring.create(directory / "ring", chunk_bytes=CHUNK_BYTES, ring_chunks=32, attempt=1)
        self.ring.record_writers(1, writers)
        self.store = store
        self.lease = MemberLease() if index else WriterLease(store, 5.0)
        self.events = EventLog(directory / "events.jsonl", role="flusher")
        self._start()

    def _start(self) -> None:
        self.inbox = Inbox()
        leads = self.number.is_lead
        guard = guarded(self.store, self.lease.check_once) if leads else self.store
        context = FlusherContext(guard, self.lease, self.inbox, self.events, share=self.number)
        kind = Maintenance if leads else NoMaintenance
        self.maintenance = kind(context, MaintenanceRules(verify=False, keep=RetentionPolicy(0)))
        self.heard = Heard()
        self.engine = Engine(
            self.ring, context, self.maintenance, writers=ConcurrencyLimit(2), listener=self.heard
        )

    def crash(self, writers: int) -> None:
        """The process dies; the next one is of this many."""
        self.engine.stop()
        self.maintenance.stop()
        self.inbox.close()
        self.number = ShareNumber(self.number.index, writers)
        self._start()

    def save(self) -> None:
        self.fill()
        self.stage()

    def fill(self) -> None:
        self.ring.put_layout(IMAGE.layout)
        self.engine.begin(KEY, IMAGE.layout)
        for chunk in self.chunks:
            slot = next(n for n in range(32) if self.ring.state(n) is SlotState.FREE)
            self.ring.mark_filling(slot, *KEY, chunk)
            data = IMAGE.chunk_bytes(chunk)
            self.ring.slot_memory(slot)[: len(data)] = data
            self.ring.mark_full(slot, IMAGE.sources(chunk), len(data))
            self.engine.add_chunk(self.ring.record(slot))

    def stage(self) -> None:
        self.ring.write_checkpoint(*KEY, "staged", IMAGE.layout.digest, {})
        self.engine.mark_staged(KEY)

    def close(self) -> None:
        self.engine.stop()
        self.maintenance.stop()
        self.lease.end()
        self.inbox.close()
        self.events.close()
        self.ring.close()


def drain(*writers: Writer) -> None:
    turn_until(writers, lambda: all(writer.engine.idle for writer in writers))


def turn_until(writers: Iterable[Writer], is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < until
        for writer in writers:
            writer.inbox.wait(0.01)
            writer.engine.run_once()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_FIRST", 0.001)
    return MemoryStore()


@pytest.fixture
def writers(tmp_path: Path, store: MemoryStore) -> Iterator[list[Writer]]:
    made = [Writer(tmp_path / str(index), store, index) for index in range(2)]
    yield made
    for writer in made:
        writer.close()


def test_two_engines_make_one_file(store: MemoryStore, writers: list[Writer]) -> None:
    for writer in reversed(writers):
        writer.save()
    drain(*writers)
    assert store.objects["step-000000005.pt"] == IMAGE.final
    assert [len(writer.heard.durables) for writer in writers] == [1, 1]
    assert [name for name in store.objects if name.startswith(FOLDER)] == []
    assert store.open_uploads == []


class Together(MemoryStore):
    """A store that answers reads of seals only when as many reads wait as the barrier has parties."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier: threading.Barrier | None = None

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        if self.barrier is not None and ".seal-" in name:
            self.barrier.wait(DEADLINE_SECONDS)
        return super().read(name, bytes_max)


def test_the_commit_of_four_shares_adds_two_round_trips(tmp_path: Path) -> None:
    store = Together()
    writers = [Writer(tmp_path / str(index), store, index, 4) for index in range(4)]
    lead, *members = writers
    for writer in writers:
        writer.fill()
    for member in members:
        member.stage()
    turn_until(writers, lambda: all(f"{FOLDER}seal-{n}" in store.objects for n in (2, 3, 4)))
    acts: list[tuple[str, str]] = []
    store.before = lambda act, name: acts.append((act, name))
    store.barrier = threading.Barrier(3)
    lead.stage()
    drain(lead)
    drain(*members)
    first = acts.index(("write", f"{FOLDER}seal-1"))
    last = acts.index(("create", "step-000000005.json"))
    between = [act for act, name in acts[first + 1 : last] if not name.startswith(".holdfast/writer-")]
    assert between == ["resume", "publish"]
    assert store.objects["step-000000005.pt"] == IMAGE.final
    for writer in writers:
        writer.close()


def test_the_lead_gives_up_a_share_that_is_not_sealed_in_time(
    store: MemoryStore, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, member = writers
    monkeypatch.setattr(looks_module, "_OTHERS_SECONDS_MAX", 0.0)
    lead.save()
    drain(lead)
    assert "for share 2 of 2 to be sealed" in str(lead.heard.failures[-1])
    assert [name for name in store.objects if name.startswith(FOLDER)] == [f"{FOLDER}void"]
    assert store.open_uploads == []
    member.save()
    drain(member)
    assert "share 1, on" in str(member.heard.failures[-1])
    assert member.heard.durables == []


def test_durable_is_told_once_by_the_lead_and_each_share_tells_of_its_own(
    tmp_path: Path, writers: list[Writer]
) -> None:
    for writer in writers:
        writer.save()
    drain(*writers)
    shown = {"share_sealed", "seal_read", "durable", "published"}
    told = [
        [(one["event"], one.get("share")) for one in read_events(tmp_path / str(index) / "events.jsonl")]
        for index in range(2)
    ]
    assert [one for one in told[0] if one[0] in shown] == [
        ("share_sealed", "1/2"),
        ("seal_read", "2/2"),
        ("durable", None),
    ]
    assert [one for one in told[1] if one[0] in shown] == [("share_sealed", "2/2"), ("published", None)]


def test_a_share_that_its_flusher_gave_up_before_it_died_is_not_begun_again(
    store: MemoryStore, writers: list[Writer]
) -> None:
    lead, member = writers
    ShareRecords(store, KEY).put_void(1, "its disk is gone")
    store.delete(f"{FOLDER}void")  # it died between the two
    lead.fill()
    member.save()
    turn_until(writers, lambda: member.engine.only_sealed)
    lead.stage()
    drain(*writers)
    for writer in writers:
        assert "share 2, on" in str(writer.heard.failures[-1])
        assert "its disk is gone" in str(writer.heard.failures[-1])
    assert "step-000000005.json" not in store.objects
    assert lead.heard.durables == member.heard.durables == []


def test_a_share_that_is_sealed_needs_its_flusher_no_more(store: MemoryStore, writers: list[Writer]) -> None:
    lead, member = writers
    lead.fill()
    assert (member.engine.idle, member.engine.only_sealed) == (True, True)
    member.fill()
    assert not member.engine.only_sealed
    member.stage()
    turn_until(writers, lambda: member.engine.only_sealed)
    assert not member.engine.idle
    member.engine.stop()
    lead.stage()
    turn_until([lead], lambda: lead.engine.idle)
    assert store.objects["step-000000005.pt"] == IMAGE.final


def test_a_share_waits_for_its_lead_not_for_ever(
    store: MemoryStore, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = writers[1]
    monkeypatch.setattr(looks_module, "_LEAD_SECONDS_MAX", 0.0)
    member.save()
    drain(member)
    assert "for the first stager's flusher to begin the upload" in str(member.heard.failures[-1])
    assert f"{FOLDER}void" in store.objects
    assert all(member.ring.state(slot) is SlotState.FREE for slot in range(32))


def test_a_void_is_gone_once_a_later_step_is_published(
    store: MemoryStore, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, _ = writers
    monkeypatch.setattr(looks_module, "_OTHERS_SECONDS_MAX", 0.0)
    older = CheckpointId(1, 4)
    lead.engine.begin(older, IMAGE.layout)
    lead.engine.abort(older, HoldfastError("a rank is gone"))
    drain(lead)
    assert [name for name in store.objects if "s000000004" in name] == [
        ".holdfast/shares/a000001-s000000004.void"
    ]
    monkeypatch.undo()
    for writer in writers:
        writer.save()
    drain(*writers)
    assert [name for name in store.objects if "/shares/" in name] == []


def test_a_void_of_another_share_is_gone_too_though_the_ring_forgot_its_attempt(
    store: MemoryStore, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, member = writers
    older = CheckpointId(1, 4)
    for writer in (lead, member):  # the member gives it up after the lead has cleared its records
        writer.engine.begin(older, IMAGE.layout)
        writer.engine.abort(older, HoldfastError("a rank is gone"))
        drain(writer)
    assert ".holdfast/shares/a000001-s000000004.seal-2" in store.objects
    monkeypatch.setattr(lead.engine._jobs._share_jobs, "_writers_of", lambda _: 1)
    for writer in writers:
        writer.save()
    drain(*writers)
    assert [name for name in store.objects if "s000000004" in name] == []


def test_an_image_of_one_part_is_written_by_the_lead_alone(store: MemoryStore, writers: list[Writer]) -> None:
    small = made_up(1, entries=1, chunk_bytes=1 << 20, ranks=1, entry_bytes_max=9)
    lead, member = writers
    before: list[str] = []
    store.before = lambda act, name: before.append(name)
    lead.engine.begin(KEY, small.layout)
    lead.engine.abort(KEY, HoldfastError("a rank is gone"))
    drain(lead)
    assert [name for name in before if "/shares/" in name] == []
    member.engine.begin(KEY, small.layout)
    assert "the image has only 1 shares" in str(member.heard.failures[-1])


def test_a_share_whose_upload_was_taken_back_hears_why(store: MemoryStore, writers: list[Writer]) -> None:
    lead, member = writers
    lead.engine.begin(KEY, IMAGE.layout)
    member.engine.begin(KEY, IMAGE.layout)
    turn_until(writers, lambda: member.ring.has_progress(*KEY))  # its upload is open
    lead.engine.abort(KEY, HoldfastError("a rank is gone"))
    drain(lead)
    member.save()
    drain(member)
    assert "share 1, on" in str(member.heard.failures[-1])
    assert "a rank is gone" in str(member.heard.failures[-1])


def test_a_share_goes_on_as_it_began_although_the_run_has_one_stager_now(
    store: MemoryStore, writers: list[Writer]
) -> None:
    lead, member = writers
    lead.save()
    turn_until([lead], lambda: f"{FOLDER}seal-1" in store.objects)
    lead.crash(writers=1)
    assert [*adopt_staged(lead.engine, lead.ring)] == [KEY]
    member.save()
    drain(lead, member)
    assert store.objects["step-000000005.pt"] == IMAGE.final
    assert [len(writer.heard.durables) for writer in writers] == [1, 1]


def test_a_lead_that_has_lost_the_run_takes_nothing_back(store: MemoryStore, writers: list[Writer]) -> None:
    """The writer that has the run now may be publishing it."""
    lead, member = writers
    lead.engine.begin(KEY, IMAGE.layout)
    member.save()
    turn_until([lead], lambda: f"{FOLDER}start" in store.objects)
    Lease.acquire(store, takeover=True)
    lead.engine.abort(KEY, HoldfastError("a rank is gone"))
    drain(lead)
    assert f"{FOLDER}void" not in store.objects
    assert f"{FOLDER}start" in store.objects
    assert store.open_uploads == ["step-000000005.pt"]
    member.engine.stop()


def test_a_share_of_an_earlier_job_does_not_wait_for_a_lead_that_never_began(
    store: MemoryStore, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = writers[1]
    monkeypatch.setattr(looks_module, "_EARLIER_SECONDS_MAX", 0.0)
    member.save()
    for _ in range(20):
        member.inbox.wait(0.01)
        member.engine.run_once()
    assert member.heard.failures == []
    member.ring.set_attempt(2)
    member.engine.begin_attempt()
    drain(member)
    assert "to begin the upload" in str(member.heard.failures[-1])
