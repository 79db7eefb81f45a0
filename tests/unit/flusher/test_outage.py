"""The engine while the store refuses writes: which complete checkpoints stay in the ring, and their fate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flusher.engine as engine_module
import flusher.succession as succession_module
from flusher import retry_queue
from flusher.recovery import adopt_staged, resolve_checkpoints
from holdfast.errors import BusyError, DamageError, StoreError
from holdfast.faultpoint import Point
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.journal import SlotState
from tests.support.images import made_up
from tests.unit.flusher.test_engine import CHUNK_BYTES, DEADLINE_SECONDS, Rig

IMAGE = made_up(0, entries=12, chunk_bytes=CHUNK_BYTES, ranks=3, entry_bytes_max=20_000)  # 14 of 32 slots


class Refusing:
    """A store that refuses checkpoints while it is `down`, after `lets` calls of each name have passed."""

    def __init__(self, **lets: int) -> None:
        self.down, self.lets = True, lets

    def __call__(self, act: str, name: str) -> None:
        if act in {"begin", "write_part", "publish", "create"} and name.startswith("step-") and self.down:
            self.lets[act] = self.lets.get(act, 0) - 1
            if self.lets[act] < 0:
                raise StoreError(f"{act} {name}: no room", no_room=True)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_FIRST", 0.001)
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_MAX", 0.002)
    monkeypatch.setattr(succession_module, "_STALL_SECONDS", 0.05)
    made = Rig(tmp_path)
    made.store.before = Refusing()
    yield made
    made.engine.stop()
    made.maintenance.stop()
    made.lease.end()
    made.inbox.close()
    made.events.close()
    made.ring.close()


def turn_until(rig: Rig, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        wait = rig.engine.wait_seconds()
        rig.inbox.wait(0.05 if wait is None else min(wait, 0.05))
        rig.engine.run_once()
        assert time.monotonic() < until


def turn_for(rig: Rig, seconds: float) -> None:
    until = time.monotonic() + seconds
    turn_until(rig, lambda: time.monotonic() > until)


def mend(rig: Rig) -> None:
    assert isinstance(rig.store.before, Refusing)
    rig.store.before.down = False


def free_slots(rig: Rig) -> int:
    return sum(rig.ring.state(slot) is SlotState.FREE for slot in range(32))


def published(rig: Rig) -> set[str]:
    return {name for name in rig.store.objects if name.endswith(".pt")}


def test_the_newest_whole_step_takes_the_place_of_an_older_one_step_after_step(rig: Rig) -> None:
    rig.fill(IMAGE, 5)
    for step in range(6, 9):
        rig.fill(IMAGE, step)
        rig.engine.begin(CheckpointId(1, step + 1), IMAGE.layout)
        turn_until(rig, lambda: free_slots(rig) >= IMAGE.layout.chunks)
        assert rig.ring.checkpoint_ids() == [(1, step)]
        assert isinstance(rig.heard.failures[CheckpointId(1, step - 1)], BusyError)
    rig.fill(IMAGE, 9)
    mend(rig)
    rig.drain()
    assert published(rig) == {"step-000000008.pt", "step-000000009.pt"}
    assert rig.store.objects["step-000000009.pt"] == IMAGE.final
    assert rig.heard.failures.keys() == {CheckpointId(1, step) for step in (5, 6, 7)}
    assert rig.all_free()
    assert rig.store.open_uploads == []


def test_while_there_is_room_every_step_waits_for_the_store(rig: Rig) -> None:
    rig.fill(IMAGE, 5)
    rig.fill(IMAGE, 6)
    turn_for(rig, 0.2)
    assert rig.heard.failures == {}
    mend(rig)
    rig.drain()
    assert published(rig) == {"step-000000005.pt", "step-000000006.pt"}


def test_the_newest_whole_step_stays_whatever_comes(rig: Rig) -> None:
    rig.fill(IMAGE, 5)
    rig.engine.begin(
        CheckpointId(1, 6),
        made_up(2, entries=20, chunk_bytes=CHUNK_BYTES, ranks=3, entry_bytes_max=20_000).layout,
    )
    turn_for(rig, 0.2)
    assert rig.heard.failures == {}
    assert rig.ring.checkpoint_ids() == [(1, 5)]


def test_a_store_that_is_only_slow_costs_no_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession_module, "_STALL_SECONDS", 3600.0)
    rig.fill(IMAGE, 5)
    rig.fill(IMAGE, 6)
    rig.engine.begin(CheckpointId(1, 7), IMAGE.layout)
    turn_for(rig, 0.2)
    assert rig.heard.failures == {}


@pytest.mark.parametrize("seconds", [0.2, 3600.0])
def test_a_step_of_which_the_store_has_parts_waits_longer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(succession_module, "_STALL_SECONDS_WRITTEN", seconds)
    rig.store.before = Refusing(begin=1, write_part=2)
    rig.fill(IMAGE, 5)
    turn_until(rig, lambda: free_slots(rig) == 32 - IMAGE.layout.chunks + 2)
    rig.fill(IMAGE, 6)
    rig.engine.begin(CheckpointId(1, 7), IMAGE.layout)
    if seconds > 1.0:
        turn_for(rig, 0.15)  # three times what a step waits of which the store has nothing
        assert rig.heard.failures == {}
        return
    turn_until(rig, lambda: free_slots(rig) >= IMAGE.layout.chunks)
    assert rig.heard.failures.keys() == {CheckpointId(1, 5)}
    rig.engine.abort(CheckpointId(1, 7), BusyError("of the test"))
    mend(rig)
    rig.drain()
    assert published(rig) == {"step-000000006.pt"}
    assert rig.store.open_uploads == []


def test_a_damaged_step_takes_nobodys_place(rig: Rig) -> None:
    rig.fill(IMAGE, 5)
    turn_for(rig, 0.1)
    rig.fill(IMAGE, 6, tell=False)
    slot = next(record.slot for record in rig.ring.records() if (record.step, record.chunk) == (6, 3))
    rig.ring.slot_memory(slot)[100] ^= 1
    rig.engine.begin(CheckpointId(1, 6), IMAGE.layout)
    for record in list(rig.ring.records()):
        if record.step == 6:
            rig.engine.add_chunk(record)
    rig.engine.mark_staged(CheckpointId(1, 6))
    rig.engine.begin(CheckpointId(1, 7), IMAGE.layout)
    turn_until(
        rig, lambda: CheckpointId(1, 6) in rig.heard.failures and free_slots(rig) >= IMAGE.layout.chunks
    )
    assert isinstance(rig.heard.failures.pop(CheckpointId(1, 6)), DamageError)
    assert rig.heard.failures == {}
    rig.engine.abort(CheckpointId(1, 7), BusyError("of the test"))
    mend(rig)
    rig.drain()
    assert published(rig) == {"step-000000005.pt"}


def test_a_flusher_that_dies_as_one_makes_room_leaves_the_newest_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Raised where the process would be killed."""

    def die(point: Point) -> None:
        if point is Point.SUPERSEDED:
            raise Killed

    rig.fill(IMAGE, 5)
    rig.fill(IMAGE, 6)
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "reach", die)
        rig.engine.begin(CheckpointId(1, 7), IMAGE.layout)
        with pytest.raises(Killed):
            turn_for(rig, 1.0)
    rig.crash()
    assert adopt_staged(rig.engine, rig.ring) == [CheckpointId(1, 6)]
    assert free_slots(rig) == 32 - IMAGE.layout.chunks, "slots of the older one belong to nobody"
    mend(rig)
    rig.drain()
    assert published(rig) == {"step-000000006.pt"}
    assert rig.heard.failures == {}


def test_the_reason_of_a_step_that_was_not_staged_is_true(rig: Rig) -> None:
    for step in (5, 6):
        rig.fill(IMAGE, step, tell=False)
        rig.ring.write_checkpoint(1, step, "receiving", IMAGE.layout.digest, {})
    rig.ring.free(next(record.slot for record in rig.ring.records() if (record.step, record.chunk) == (6, 1)))
    rig.engine.begin(CheckpointId(1, 5), IMAGE.layout)
    rig.engine.begin(CheckpointId(1, 6), IMAGE.layout)
    resolve_checkpoints(rig.engine, rig.ring, "the stager ended")
    mend(rig)
    rig.drain()
    assert "before every rank had said" in str(rig.heard.failures[CheckpointId(1, 5)])
    assert "before all chunks came" in str(rig.heard.failures[CheckpointId(1, 6)])
