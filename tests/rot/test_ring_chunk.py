"""A byte of a chunk flips in the ring, after the stager marked it FULL: it never reaches a published checkpoint.

mark_full ──flip──► verify ─► patch ─► write ──flip──► publish ─► read back
                      └ DamageError: nothing published        └ the manifest says `bad`
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flusher.engine import Engine
from flusher.flusher_context import FlusherContext
from flusher.listener import DurableStep, FlushListener
from flusher.retention import RetentionPolicy
from flusher.verify_and_prune import Maintenance, MaintenanceRules, ReadBack
from flusher.workers import Inbox
from flusher.writer_lease import WriterLease
from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import DamageError, HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.manifest import State, manifest_name
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.store.concurrency import ConcurrencyLimit
from holdfast.telemetry.events import EventLog
from tests.rot.flips import COUNT, Flip, flips
from tests.support.images import Image, from_torch_file, made_up
from tests.support.memory_store import MemoryStore

CHUNK_BYTES = 4096
SLOTS = 16
DEADLINE_SECONDS = 120.0
IMAGE = made_up(11, entries=7, chunk_bytes=CHUNK_BYTES, ranks=3, entry_bytes_max=4000)


class _Heard(FlushListener):
    def __init__(self) -> None:
        self.durables: dict[CheckpointId, DurableStep] = {}
        self.read_backs: list[ReadBack] = []
        self.failures: dict[CheckpointId, HoldfastError] = {}

    def began(self, key: CheckpointId, part_chunks: int) -> None: ...

    def grown(self, note: str) -> None: ...

    def durable(self, key: CheckpointId, durable: DurableStep) -> None:
        self.durables[key] = durable

    def read_back(self, result: ReadBack) -> None:
        self.read_backs.append(result)

    def failed(self, key: CheckpointId, error: HoldfastError) -> None:
        self.failures[key] = error


class _Rig:
    """A real ring and a real engine with its threads, which writes to a store in memory."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryStore()
        self.ring = Ring.create(directory / "ring", chunk_bytes=CHUNK_BYTES, ring_chunks=SLOTS, attempt=1)
        self.inbox, self.heard = Inbox(), _Heard()
        self.lease = WriterLease(self.store, 5.0)
        self.events = EventLog(directory / "events.jsonl", role="flusher")
        self.context = FlusherContext(self.store, self.lease, self.inbox, self.events)
        self.maintenance = Maintenance(self.context, MaintenanceRules(verify=True, keep=RetentionPolicy(0)))
        self.engine = Engine(
            self.ring,
            self.context,
            self.maintenance,
            writers=ConcurrencyLimit(2),
            listener=self.heard,
        )

    def save(self, image: Image, step: int, flip: Flip | None) -> None:
        """Put a checkpoint into the ring, flip one byte, pass it to the engine, and wait for the result."""
        self.ring.put_layout(image.layout)
        slots = {}
        for chunk in range(image.layout.chunks):
            slots[chunk] = next(n for n in range(SLOTS) if self.ring.state(n) is SlotState.FREE)
            self.ring.mark_filling(slots[chunk], 1, step, chunk)
            data = image.chunk_bytes(chunk)
            self.ring.slot_memory(slots[chunk])[: len(data)] = data
            self.ring.mark_full(slots[chunk], image.sources(chunk), len(data))
        self.ring.write_checkpoint(1, step, "staged", image.layout.digest, {})
        if flip is not None:
            chunk, offset = divmod(flip.offset, CHUNK_BYTES)
            Flip(offset, flip.mask).apply(self.ring.slot_memory(slots[chunk]))
        key = CheckpointId(1, step)
        self.engine.begin(key, image.layout)
        for slot in slots.values():
            self.engine.add_chunk(self.ring.record(slot))
        self.engine.mark_staged(key)
        self.drain()

    def drain(self) -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            maintenance_was_idle = self.maintenance.idle
            self.engine.run_once()
            if maintenance_was_idle and self.engine.idle and self.maintenance.idle:
                return
            assert time.monotonic() < until
            waits = self.engine.wait_seconds()
            self.inbox.wait(1.0 if waits is None else min(waits, 1.0))

    def end(self) -> None:
        self.engine.stop()
        self.maintenance.stop()
        self.lease.end()
        self.inbox.close()
        self.events.close()
        self.ring.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[_Rig]:
    made = _Rig(tmp_path)
    yield made
    made.end()


def test_no_flip_before_verify_is_ever_published(rig: _Rig, tmp_path: Path) -> None:
    index = LayoutIndex(IMAGE.layout)
    hit: Counter[int] = Counter()
    harmless = 0
    for step, flip in enumerate(flips("ring", len(IMAGE.sent)), start=1):
        rig.save(IMAGE, step, flip)
        key, name = CheckpointId(1, step), f"step-{step:09d}.pt"
        chunk, offset = divmod(flip.offset, CHUNK_BYTES)
        if any(first <= offset < first + nbytes for first, nbytes in index.fields[chunk].extents()):
            # The four bytes of a CRC field: zeroed before the CRC is computed, and written by the flusher itself.
            assert rig.store.objects.pop(name) == IMAGE.final
            del rig.store.objects[manifest_name(name)]
            harmless += 1
            continue
        error = rig.heard.failures[key]
        assert isinstance(error, DamageError)
        rank = next(
            r
            for r in IMAGE.layout.senders(chunk)
            if any(e.offset <= flip.offset < e.end for e in IMAGE.layout.pieces(chunk, r))
        )
        assert f"step {step} " in str(error)
        assert f"chunk {chunk} from rank {rank}" in str(error)
        assert key not in rig.heard.durables
        hit[chunk] += 1
        assert [n for n in rig.store.objects if n.startswith("step-")] == [], (
            "something of it is in the store"
        )
        assert all(rig.ring.state(slot) is SlotState.FREE for slot in range(SLOTS)), "a slot was leaked"
    assert hit.total() + harmless == COUNT
    assert set(hit) == set(range(IMAGE.layout.chunks))
    assert harmless < COUNT // 10
    assert rig.store.open_uploads == []
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["event"] == "flush_failed"]
    assert len(failed) == hit.total()
    assert {line["code"] for line in failed} == {DamageError.code}


def test_a_flip_on_the_way_to_the_store_is_found_by_reading_back(rig: _Rig, tmp_path: Path) -> None:
    """The flip comes after the check in the ring: in a write buffer, on the network, in the store's memory."""
    torch.save({"weight": torch.arange(900.0), "bias": torch.arange(9.0)}, tmp_path / "real.pt")
    image = from_torch_file(tmp_path / "real.pt", chunk_bytes=CHUNK_BYTES, ranks=2)
    rig.save(image, 1, None)
    assert [result.state for result in rig.heard.read_backs] == [State.VERIFIED]
    create = rig.store.create
    pending: list[Flip] = []

    def flipping(name: str, data: bytes) -> bool:
        """Flip when the manifest is written: the file exists by then, but has not been read back."""
        file = name.removesuffix(".json") + ".pt"
        if pending and file in rig.store.objects and name.startswith("step-"):
            rig.store.objects[file] = pending.pop().applied(rig.store.objects[file])
        return create(name, data)

    rig.store.create = flipping  # type: ignore[method-assign]
    for step, flip in enumerate(flips("write", len(image.final), 200), start=2):
        pending.append(flip)
        rig.save(image, step, None)
        assert not pending
        assert rig.heard.read_backs[-1].state is State.BAD, flip
        newest, *_ = Catalog(rig.store).list()
        assert (newest.step, newest.state) == (step, "bad")
        assert Catalog(rig.store).get().step == 1, "the one before is not the one to use"
        for name in (f"step-{step:09d}.pt", f"step-{step:09d}.json"):
            del rig.store.objects[name]
