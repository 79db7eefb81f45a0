"""The engine on a real ring, with a store in memory that fails on demand."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flusher import retry_queue
from flusher.engine import Engine
from flusher.flusher_context import FlusherContext
from flusher.listener import DurableStep, FlushListener
from flusher.recovery import adopt_staged, resolve_checkpoints
from flusher.retention import RetentionPolicy
from flusher.ring_room import RingGrown
from flusher.verify_and_prune import Maintenance, MaintenanceRules, ReadBack
from flusher.workers import Inbox
from flusher.writer_lease import WriterLease
from holdfast.errors import FencedError, HoldfastError, PeerLost, ProtocolError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest, State, manifest_name
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.store.concurrency import ConcurrencyLimit
from holdfast.store.guarded import guarded
from holdfast.telemetry.events import EventLog
from tests.support.images import Image, from_torch_file, made_up
from tests.support.memory_store import MemoryStore

CHUNK_BYTES = 4096
DEADLINE_SECONDS = 60.0


class Heard(FlushListener):
    """Records the engine's reports."""

    def __init__(self) -> None:
        self.durables: dict[CheckpointId, DurableStep] = {}
        self.read_backs: list[ReadBack] = []
        self.failures: dict[CheckpointId, HoldfastError] = {}
        self.beginnings: list[tuple[CheckpointId, int]] = []
        self.notes: list[str] = []

    def began(self, key: CheckpointId, part_chunks: int) -> None:
        self.beginnings.append((key, part_chunks))

    def grown(self, note: str) -> None:
        self.notes.append(note)

    def durable(self, key: CheckpointId, durable: DurableStep) -> None:
        self.durables[key] = durable

    def read_back(self, result: ReadBack) -> None:
        self.read_backs.append(result)

    def failed(self, key: CheckpointId, error: HoldfastError) -> None:
        self.failures[key] = error


class Rig:
    """An engine with its ring, store and threads."""

    def __init__(self, directory: Path, *, verify: bool = False) -> None:
        self.store = MemoryStore()
        self.ring = Ring.create(
            directory / "ring", chunk_bytes=CHUNK_BYTES, ring_chunks=32, attempt=1, room_chunks=512
        )
        self.heard, self._verify = Heard(), verify
        self.lease = WriterLease(self.store, 5.0)
        self.events = EventLog(directory / "events.jsonl", role="flusher")
        self._start()

    def _start(self) -> None:
        self.inbox = Inbox()
        guard = guarded(self.store, self.lease.check_once)
        self.context = FlusherContext(guard, self.lease, self.inbox, self.events)
        self.maintenance = Maintenance(
            self.context, MaintenanceRules(verify=self._verify, keep=RetentionPolicy(0))
        )
        self.engine = self.new_engine()

    def crash(self) -> None:
        """The process dies with its threads and the messages between them; another one starts. Ring and store stay."""
        self.engine.stop()
        self.maintenance.stop()
        self.inbox.close()
        self._start()

    def new_engine(self, request_room: Callable[[int], bool] = lambda _: False) -> Engine:
        return Engine(
            self.ring,
            self.context,
            self.maintenance,
            writers=ConcurrencyLimit(2),
            listener=self.heard,
            request_room=request_room,
        )

    def fill(self, image: Image, step: int, *, tell: bool = True) -> None:
        """A whole checkpoint lies in the ring."""
        digest = self.ring.put_layout(image.layout)
        if tell:
            self.engine.begin(CheckpointId(1, step), image.layout)
        for chunk in range(image.layout.chunks):
            slot = next(n for n in range(32) if self.ring.state(n) is SlotState.FREE)
            self.ring.mark_filling(slot, 1, step, chunk)
            data = image.chunk_bytes(chunk)
            self.ring.slot_memory(slot)[: len(data)] = data
            self.ring.mark_full(slot, image.sources(chunk), len(data))
            if tell:
                self.engine.add_chunk(self.ring.record(slot))
        self.ring.write_checkpoint(1, step, "staged", digest, {"ranks": {"0": {"saved_at_unix": 1.0}}})
        if tell:
            self.engine.mark_staged(CheckpointId(1, step))

    def drain(self) -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            maintenance_was_idle = self.maintenance.idle
            self.engine.run_once()
            if maintenance_was_idle and self.engine.idle and self.maintenance.idle:
                return
            assert time.monotonic() < until
            waits = self.engine.wait_seconds()
            self.inbox.wait(5.0 if waits is None else waits)

    def manifest(self, file: str) -> Manifest:
        return Manifest.from_bytes(self.store.read(manifest_name(file)), source=file)

    def all_free(self) -> bool:
        return all(self.ring.state(slot) is SlotState.FREE for slot in range(32))

    def happened(self, directory: Path, event: str) -> int:
        lines = (directory / "events.jsonl").read_text().splitlines()
        return sum(json.loads(line)["event"] == event for line in lines)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_FIRST", 0.001)
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_MAX", 0.002)
    made = Rig(tmp_path, verify=True)
    yield made
    made.engine.stop()
    made.maintenance.stop()
    made.lease.end()
    made.inbox.close()
    made.events.close()
    made.ring.close()


@pytest.fixture
def real(tmp_path: Path) -> Image:
    """A true zip file: reading back also looks at its directory."""
    torch.save({"weight": torch.arange(5000.0), "bias": torch.arange(9.0)}, tmp_path / "real.pt")
    return from_torch_file(tmp_path / "real.pt", chunk_bytes=CHUNK_BYTES, ranks=2)


IMAGE = made_up(1, entries=6, chunk_bytes=CHUNK_BYTES, ranks=3, entry_bytes_max=9000)
LARGER = made_up(7, entries=10, chunk_bytes=CHUNK_BYTES, ranks=3, entry_bytes_max=9000)
KEY = CheckpointId(1, 5)
FILE = "step-000000005.pt"


def manifests_in_memory() -> int:
    gc.collect()
    return sum(type(one) is Manifest for one in gc.get_objects())


class Failing:
    """Fails the first `times` acts called `act`."""

    def __init__(self, act: str, times: int, *, retriable: bool) -> None:
        self.act, self.left, self.retriable = act, times, retriable
        self.lock = threading.Lock()

    def __call__(self, act: str, name: str) -> None:
        with self.lock:
            hit = act == self.act and name.startswith("step-") and self.left > 0
            self.left -= hit
        if hit:
            raise StoreError(f"{act} {name}: no", retriable=self.retriable)


@pytest.mark.parametrize("act", ["begin", "write_part", "publish", "create"])
def test_a_retriable_failure_is_retried_and_the_checkpoint_kept_until_then(
    rig: Rig, tmp_path: Path, act: str
) -> None:
    rig.store.before = Failing(act, 3, retriable=True)
    rig.fill(IMAGE, 5)
    rig.drain()
    assert rig.store.objects[FILE] == IMAGE.final
    assert rig.heard.failures == {}
    assert rig.happened(tmp_path, "flush_held") >= 1
    assert rig.happened(tmp_path, "flush_held") == rig.happened(tmp_path, "flush_resumed")
    assert rig.all_free()
    assert rig.ring.checkpoint_ids() == []


@pytest.mark.parametrize("act", ["begin", "write_part", "publish", "create"])
def test_a_failure_that_waiting_does_not_mend_holds_the_checkpoint(
    rig: Rig, tmp_path: Path, act: str
) -> None:
    failing = rig.store.before = Failing(act, 10_000, retriable=False)
    rig.fill(IMAGE, 5)
    until = time.monotonic() + DEADLINE_SECONDS
    while failing.left > 10_000 - 12:
        rig.inbox.wait(0.05)
        rig.engine.run_once()
        assert not rig.engine.only_receiving, (
            "one that is told to end would do so, and nobody hear what waits"
        )
        assert time.monotonic() < until
    assert rig.heard.failures == {}
    assert rig.happened(tmp_path, "flush_held") >= 1
    assert not rig.engine.idle
    failing.left = 0
    rig.drain()
    assert rig.store.objects[FILE] == IMAGE.final
    assert rig.heard.failures == {}
    assert rig.all_free()
    assert list((tmp_path / "ring").glob("flush-*")) == []


def test_an_aborted_checkpoint_does_not_wait_for_the_store(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_FIRST", 3600.0)
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_MAX", 3600.0)
    failing = rig.store.before = Failing("write_part", 10_000, retriable=False)
    rig.fill(IMAGE, 5)
    until = time.monotonic() + DEADLINE_SECONDS
    while rig.engine.held_error is None:
        rig.inbox.wait(0.05)
        rig.engine.run_once()
        assert time.monotonic() < until
    failing.left = 0
    rig.engine.abort(KEY, ProtocolError("given up"))
    rig.drain()
    assert str(rig.heard.failures[KEY]) == "given up"
    assert rig.all_free()


@pytest.mark.parametrize("resumable", [True, False])
def test_an_upload_that_no_other_flusher_could_go_on_with_waits_until_the_ring_has_grown(
    rig: Rig, resumable: bool
) -> None:
    """Else it would be taken for one that the ring cannot hold, and the death of a flusher would cost it."""
    rig.store.resumable = resumable
    image = made_up(3, entries=300, chunk_bytes=CHUNK_BYTES, ranks=2, entry_bytes_max=9000)
    chunks, asked = image.layout.chunks, list[int]()
    assert chunks > rig.ring.ring_chunks

    def request_room(image_chunks: int) -> bool:
        asked.append(image_chunks)
        return True

    rig.engine = engine = rig.new_engine(request_room)
    engine.begin(KEY, image.layout)
    assert asked == [chunks]
    until = time.monotonic() + DEADLINE_SECONDS
    while not (rig.heard.beginnings or engine._opened_early):
        assert time.monotonic() < until
        engine.run_once()
    soon = [(KEY, 1)] if resumable else []
    assert rig.heard.beginnings == soon
    rig.ring.allocate(2 * chunks)
    rig.inbox.put(RingGrown(2 * chunks, ""))
    engine.run_once()
    assert rig.ring.ring_chunks == 2 * chunks
    assert rig.heard.beginnings == soon, "it may grow further"
    rig.inbox.put(RingGrown(2 * chunks, "the ring has room for two"))
    engine.run_once()
    assert rig.heard.beginnings == (soon or [(KEY, chunks)])
    assert rig.heard.notes == ["", "the ring has room for two"]


@pytest.mark.parametrize("resumable", [True, False])
def test_the_stager_hears_how_many_chunks_must_be_in_the_ring_together(rig: Rig, resumable: bool) -> None:
    """Else newer checkpoints would get slots that one which frees none before it is published still needs."""
    rig.store.part_chunks, rig.store.resumable = 1, resumable
    rig.fill(IMAGE, 5)
    rig.drain()
    rig.engine.begin(KEY, IMAGE.layout)
    together = 1 if resumable else IMAGE.layout.chunks
    assert IMAGE.layout.chunks > 1
    assert set(rig.heard.beginnings) == {(KEY, together)}


@pytest.mark.parametrize("act", ["write_part", "publish"])
def test_when_what_was_written_is_lost_it_begins_anew_if_every_chunk_is_still_here(
    rig: Rig, act: str
) -> None:
    rig.store.part_chunks = IMAGE.layout.chunks if act == "write_part" else 1
    rig.store.resumable = act == "write_part"  # else no slot is freed before it is published
    failures = iter([True])

    def lose(done: str, name: str) -> None:
        if done == act and next(failures, False):
            raise StoreError("the sync failed", begin_anew=True)

    rig.store.before = lose
    rig.fill(IMAGE, 5)
    rig.drain()
    assert rig.heard.failures == {}
    assert rig.store.objects[FILE] == IMAGE.final
    assert rig.store.begun == 2
    assert rig.store.open_uploads == []
    assert rig.all_free()


def test_when_what_was_written_is_lost_and_its_chunks_are_gone_it_is_given_up_by_name(rig: Rig) -> None:
    def lose(done: str, name: str) -> None:
        if done == "publish":
            raise StoreError("the sync failed", begin_anew=True)

    rig.store.before = lose
    rig.fill(IMAGE, 5)
    rig.drain()
    assert "the sync failed" in str(rig.heard.failures[KEY])
    assert rig.store.open_uploads == []
    assert rig.all_free()


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
@pytest.mark.parametrize("torn", [False, True])
def test_another_engine_goes_on_and_writes_no_part_again(
    rig: Rig, tmp_path: Path, parts: int, torn: bool
) -> None:
    """The first engine stands still in the store when `parts` parts are recorded; a second takes the ring over."""
    assert LARGER.layout.chunks > 4
    gate, count, lock = threading.Event(), 0, threading.Lock()

    def stand_still(done: str, name: str) -> None:
        nonlocal count
        if done == "write_part":
            with lock:
                count += 1
                mine = count
            if mine > parts:
                gate.wait(DEADLINE_SECONDS)
                raise StoreError("dead")

    rig.store.before = stand_still
    rig.fill(LARGER, 5)
    until = time.monotonic() + DEADLINE_SECONDS
    record = tmp_path / "ring" / "flush-1-5"
    while count < parts + 2 or record.read_bytes().count(b"\n") < 1 + parts:
        rig.inbox.wait(0.05)
        rig.engine.run_once()
        assert time.monotonic() < until
    if torn:
        with record.open("ab") as file:
            file.write(b'00000000 {"part":')
    rig.engine.run_once()  # both writers stand still: nothing of the old one is left in the inbox
    written: list[str] = []
    rig.store.before = lambda done, name: written.append(done)
    old = rig.engine
    rig.engine = rig.new_engine()
    assert adopt_staged(rig.engine, rig.ring) == [KEY]
    try:
        rig.drain()
        assert rig.heard.failures == {}
        assert rig.store.objects[FILE] == LARGER.final
        assert written.count("write_part") == LARGER.layout.chunks - parts
        assert rig.store.begun == 1
        assert rig.all_free()
        assert list((tmp_path / "ring").glob("flush-*")) == []
        said = rig.heard.durables[KEY].record
        assert said.get("parts_resumed", 0) == parts
        assert said["parts_written"] == LARGER.layout.chunks - parts
    finally:
        gate.set()
        old.stop()


def test_a_part_that_the_store_lost_is_named_and_the_checkpoint_given_up(rig: Rig) -> None:
    rig.store.before = Failing("publish", 10_000, retriable=True)
    rig.fill(IMAGE, 5)
    until = time.monotonic() + DEADLINE_SECONDS
    while rig.engine.held_error is None:
        rig.inbox.wait(0.05)
        rig.engine.run_once()
        assert time.monotonic() < until
    (parts,) = rig.store.uploads.values()
    del parts[2]
    rig.crash()
    rig.store.before = lambda act, name: None
    adopt_staged(rig.engine, rig.ring)
    rig.drain()
    assert "part 2" in str(rig.heard.failures[KEY])
    assert FILE not in rig.store.objects
    assert rig.store.open_uploads == []


def test_a_bug_in_a_backend_costs_one_checkpoint_not_the_process(rig: Rig) -> None:
    def bug(act: str, name: str) -> None:
        if act == "write_part":
            raise ZeroDivisionError("oops")

    rig.store.before = bug
    rig.fill(IMAGE, 5)
    rig.drain()
    assert "ZeroDivisionError: oops" in str(rig.heard.failures[KEY])


def test_a_file_that_changed_in_the_store_is_marked_bad(rig: Rig, real: Image) -> None:
    def damage(act: str, name: str) -> None:
        if act == "read_into" and name == FILE:
            entry = next(e for e in real.layout.entries if e.name.endswith("/data/0"))
            data = bytearray(real.final)
            data[entry.offset] ^= 1
            rig.store.objects[FILE] = bytes(data)

    rig.store.before = damage
    rig.fill(real, 5)
    rig.drain()
    rig.fill(real, 6)
    rig.drain()
    first, second = rig.heard.read_backs
    assert (first.state, second.state) == (State.BAD, State.VERIFIED)
    assert "state/0" in first.note
    manifest = Manifest.from_bytes(rig.store.objects["step-000000005.json"], source="x")
    assert (manifest.state, manifest.note) == (State.BAD, first.note)


def test_a_store_that_cannot_be_read_back_leaves_the_checkpoint_durable(rig: Rig) -> None:
    rig.store.before = Failing("read_into", 1000, retriable=False)
    rig.fill(IMAGE, 5)
    rig.drain()
    (result,) = rig.heard.read_backs
    assert result.state is State.DURABLE
    manifest = Manifest.from_bytes(rig.store.objects["step-000000005.json"], source="x")
    assert manifest.state is State.DURABLE


def test_a_run_that_was_taken_over_is_not_published_to(rig: Rig) -> None:
    rig.fill(IMAGE, 5, tell=False)
    claim = json.loads(rig.store.objects[".holdfast/writer-000001.json"])
    taken = claim | {"attempt": 2, "write_id": "other"}
    rig.store.objects[".holdfast/writer-000002.json"] = json.dumps(taken).encode()
    adopt_staged(rig.engine, rig.ring)
    with pytest.raises(FencedError, match="took the run over"):
        rig.drain()
    assert FILE not in rig.store.objects


def test_two_checkpoints_of_one_step_on_their_way_do_not_share_a_name(rig: Rig) -> None:
    release = threading.Event()

    def hold(act: str, name: str) -> None:
        if act == "write_part":
            release.wait(DEADLINE_SECONDS)

    rig.store.before = hold
    rig.fill(IMAGE, 5)
    rig.engine.begin(CheckpointId(2, 5), IMAGE.layout)
    release.set()
    for chunk in range(IMAGE.layout.chunks):
        slot = next(n for n in range(31, -1, -1) if rig.ring.state(n) is SlotState.FREE)
        rig.ring.mark_filling(slot, 2, 5, chunk)
        data = IMAGE.chunk_bytes(chunk)
        rig.ring.slot_memory(slot)[: len(data)] = data
        rig.ring.mark_full(slot, IMAGE.sources(chunk), len(data))
        rig.engine.add_chunk(rig.ring.record(slot))
    rig.engine.mark_staged(CheckpointId(2, 5))
    rig.drain()
    assert {m.file for m in rig.heard.durables.values()} == {FILE, "step-000000005-a002.pt"}


def test_manifests_of_the_past_take_no_memory(rig: Rig) -> None:
    """Each names every tensor; what became of a step is remembered for many steps."""
    before = manifests_in_memory()
    for step in range(5, 25):
        rig.fill(IMAGE, step)
        rig.drain()
    assert len(rig.heard.durables) == 20
    deadline = time.monotonic() + DEADLINE_SECONDS
    while manifests_in_memory() - before > 1:  # a thread lets go of its job after it has said that it is done
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_slot_that_is_not_full_is_refused(rig: Rig) -> None:
    with pytest.raises(ProtocolError, match="the journal says FREE"):
        rig.engine.add_chunk(rig.ring.record(3))


def test_a_share_that_is_being_given_up_is_not_begun_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flusher.engine.part_chunks_for", lambda *_: 1)
    rig.ring.record_writers(1, 2)
    rig.engine.give_up(KEY, PeerLost("its ranks are gone"))
    rig.engine.begin(KEY, IMAGE.layout)
    assert "being given up" in str(rig.heard.failures[KEY])
    assert not rig.engine.pipeline_knows(KEY)
    rig.drain()
    assert "its ranks are gone" in str(rig.heard.failures[KEY])


def test_recovery_publishes_what_is_whole_and_gives_up_the_rest_by_name(rig: Rig) -> None:
    rig.fill(IMAGE, 5, tell=False)
    rig.fill(IMAGE, 6, tell=False)
    rig.ring.free(next(r.slot for r in rig.ring.records() if (r.step, r.chunk) == (6, 1)))
    small = made_up(2, entries=1, chunk_bytes=CHUNK_BYTES, ranks=1, entry_bytes_max=10)
    rig.ring.write_checkpoint(1, 7, "receiving", rig.ring.put_layout(small.layout), {})
    resolve_checkpoints(rig.engine, rig.ring, "the stager ended")
    rig.drain()
    assert rig.store.objects[FILE] == IMAGE.final
    assert rig.heard.durables[KEY].record["parts_written"] == IMAGE.layout.chunks
    assert rig.manifest(FILE).record["ranks"]["0"]["saved_at_unix"] == 1.0
    assert "1 of" in str(rig.heard.failures[CheckpointId(1, 6)])
    assert "the stager ended" in str(rig.heard.failures[CheckpointId(1, 7)])
    assert rig.all_free()
    assert rig.ring.checkpoint_ids() == []
    assert rig.store.open_uploads == []


def test_recovery_of_chunks_that_were_already_patched_gives_the_same_file(rig: Rig) -> None:
    rig.fill(IMAGE, 5, tell=False)
    for record in rig.ring.records():
        if record.state is SlotState.FULL:
            extent = IMAGE.layout.chunk_extent(record.chunk)
            rig.ring.slot_memory(record.slot)[: extent.nbytes] = IMAGE.final[extent.offset : extent.end]
    adopt_staged(rig.engine, rig.ring)
    rig.drain()
    assert rig.store.objects[FILE] == IMAGE.final


def test_reading_back_waits_while_something_is_to_be_written(rig: Rig, real: Image) -> None:
    order: list[str] = []
    writing = threading.Event()

    def watch(act: str, name: str) -> None:
        order.append(f"{act} {name}")
        if act == "write_part" and name != FILE:
            writing.wait(DEADLINE_SECONDS)

    rig.store.before = watch
    rig.fill(real, 5)
    rig.fill(real, 6)
    until = time.monotonic() + DEADLINE_SECONDS
    while KEY not in rig.heard.durables:  # step 6 is stuck in the store
        rig.inbox.wait(1.0)
        rig.engine.run_once()
        if order.count("write_part step-000000006.pt") == 2:
            break
        assert time.monotonic() < until
    assert not any(act.startswith("read_into") for act in order)
    writing.set()
    rig.drain()
    assert {result.state for result in rig.heard.read_backs} == {State.VERIFIED}
