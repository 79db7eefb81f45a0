"""Read-back and retention of the same checkpoint, in any order, never bring back a removed one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from flusher.flusher_context import FlusherContext
from flusher.read_pace import ReadPace
from flusher.retention import RetentionPolicy
from flusher.verify_and_prune import Maintenance, MaintenanceRules, Pruned, ReadBack
from flusher.workers import Inbox
from flusher.writer_lease import WriterLease
from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import StoreError
from holdfast.image.best_rule import BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import READ_BACK, Manifest, State, is_manifest_name, manifest_name
from holdfast.ring.doubts import DoubtedSteps
from holdfast.store.posix import PosixStore
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from tests.support.cluster import wait_until
from tests.support.restoring import publish

SECONDS_MAX = 60
_PILE_MAX = 5  # the newest that is verified, the one that is read, and what is written meanwhile


def unread(root: Path, step: int) -> Manifest:
    """A checkpoint that was just written."""
    manifest = publish(root, step, {"x": torch.full((9,), float(step))})
    durable = manifest.model_copy(update={"state": State.DURABLE})
    (root / manifest_name(durable.file)).write_bytes(durable.to_bytes())
    return durable


class Rig:
    """Maintenance of a run that keeps one checkpoint, with two of them in it."""

    def __init__(
        self,
        root: Path,
        held: contextlib.ExitStack,
        *,
        verify: bool,
        waits_seconds_max: float = SECONDS_MAX,
        set_aside: Sequence[CheckpointId] = (),
        keep: int = 1,
    ) -> None:
        self.root = root
        self.old, self.new = (unread(root, step) for step in (1, 2))
        self.store, self.inbox = PosixStore(root), Inbox()
        held.callback(self.inbox.close)
        lease = WriterLease(self.store, 30.0)
        held.callback(lease.end)
        self.maintenance = Maintenance(
            FlusherContext(self.store, lease, self.inbox, EventLog(None, role="flusher")),
            MaintenanceRules(verify=verify, keep=RetentionPolicy(keep)),
            set_aside=lambda: set_aside,
            pace=ReadPace(waits_seconds_max),
        )
        held.callback(self.maintenance.stop)

    def published(self, *manifests: Manifest) -> None:
        for manifest in manifests:
            self.maintenance.enqueue(CheckpointId(manifest.attempt, manifest.step), manifest)

    def wait(self) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not self.maintenance.idle and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.maintenance.idle

    def listed(self) -> int:
        return sum(is_manifest_name(path.name) for path in self.root.iterdir())

    def read(self, manifest: Manifest) -> Manifest:
        """As it stands in the store."""
        name = manifest_name(manifest.file)
        return Manifest.from_bytes(self.store.read(name), source=name)

    def is_listed(self, manifest: Manifest) -> bool:
        return (self.root / manifest_name(manifest.file)).exists()


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_checkpoint_that_is_named_twice_is_looked_after_once(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    """As a flusher that takes over may: from the ring, and from the store."""
    rig = Rig(tmp_path / "run", held, verify=True)
    rig.maintenance.set_busy(busy=True)  # nothing is read before all are named
    rig.published(rig.old, rig.old, rig.new)
    rig.maintenance.set_busy(busy=False)
    rig.wait()
    said = rig.inbox.drain()
    states = [(item.key.step, item.state) for item in said if isinstance(item, ReadBack)]
    assert states == [(1, State.VERIFIED), (2, State.VERIFIED)]
    assert [item.files for item in said if isinstance(item, Pruned)] == [(rig.old.file,)]
    assert not rig.is_listed(rig.old)
    kept = Manifest.from_bytes(rig.store.read(manifest_name(rig.new.file)), source=rig.new.file)
    assert kept.state is State.VERIFIED


DOUBT = Doubt(1, (1, 1), "model/w was changed after save(2)")


def test_a_doubt_marks_what_is_published_and_read_back(
    tmp_path: Path, held: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """It is never `verified` any more, its bytes are as they were, and the steps beside it are not touched."""
    rig = Rig(tmp_path / "run", held, verify=True, keep=0)
    rig.published(rig.old, rig.new)
    rig.wait()
    rig.maintenance.update_doubts(
        [DoubtedSteps(1, DOUBT), DoubtedSteps(7, Doubt(0, (0, 9), "of another attempt"))]
    )
    rig.wait()
    old, new = rig.read(rig.old), rig.read(rig.new)
    assert (old.state, old.note, old.display_state) == (State.DURABLE, READ_BACK, "doubtful")
    assert "model/w was changed after save(2)" in old.doubt
    assert (new.state, new.doubt) == (State.VERIFIED, "")
    assert not rig.maintenance.marks.is_pending
    assert caplog.text.count("is doubtful, and restore prefers others") == 1
    before = (rig.root / manifest_name(rig.old.file)).stat().st_mtime_ns
    rig.maintenance.update_doubts([DoubtedSteps(1, DOUBT)])  # as a stager says again to the next flusher
    rig.wait()
    assert (rig.root / manifest_name(rig.old.file)).stat().st_mtime_ns == before


@pytest.mark.parametrize("verify", [True, False])
def test_a_doubt_marks_what_is_published_later(
    tmp_path: Path, held: contextlib.ExitStack, verify: bool
) -> None:
    rig = Rig(tmp_path / "run", held, verify=verify, keep=0)
    (rig.root / manifest_name(rig.old.file)).unlink()
    rig.maintenance.update_doubts([DoubtedSteps(1, DOUBT)])
    rig.wait()
    (rig.root / manifest_name(rig.old.file)).write_bytes(rig.old.to_bytes())
    rig.published(rig.old, rig.new)
    rig.wait()
    assert rig.read(rig.old).display_state == "doubtful"
    assert rig.read(rig.new).display_state == ("verified" if verify else "durable")


def test_a_doubt_waits_for_a_store_that_takes_nothing(tmp_path: Path, held: contextlib.ExitStack) -> None:
    """Until then the flusher is not done, and one that is told to end leaves the ring with the doubt in it."""
    rig = Rig(tmp_path / "run", held, verify=False, keep=0)
    refusals = [StoreError("the disk is full"), StoreError("the disk is full")]
    write = rig.store.write

    def refusing(name: str, data: bytes) -> None:
        if refusals:
            raise refusals.pop()
        write(name, data)

    rig.store.write = refusing  # type: ignore[method-assign]
    rig.maintenance.update_doubts([DoubtedSteps(1, DOUBT)])
    owes, is_idle = rig.maintenance.marks.is_pending, rig.maintenance.idle
    assert owes
    assert not is_idle
    rig.wait()
    assert not refusals
    assert not rig.maintenance.marks.is_pending
    assert rig.read(rig.old).display_state == "doubtful"


@pytest.mark.parametrize("verify", [True, False], ids=["read back", "not read back"])
def test_a_mark_that_the_store_refuses_as_a_checkpoint_is_published_is_tried_again(
    tmp_path: Path, held: contextlib.ExitStack, verify: bool
) -> None:
    """The doubt was there before the checkpoint: nothing else would come back to it."""
    rig = Rig(tmp_path / "run", held, verify=verify, keep=0)
    (rig.root / manifest_name(rig.old.file)).unlink()
    rig.maintenance.update_doubts([DoubtedSteps(1, DOUBT)])
    rig.wait()
    (rig.root / manifest_name(rig.old.file)).write_bytes(rig.old.to_bytes())
    refusals = [StoreError("connection reset")] * (1 + verify)  # of the mark, and of what was read back
    write = rig.store.write

    def refusing(name: str, data: bytes) -> None:
        if refusals and name == manifest_name(rig.old.file):
            raise refusals.pop()
        write(name, data)

    rig.store.write = refusing  # type: ignore[method-assign]
    rig.published(rig.old)
    rig.wait()
    assert not refusals
    assert not rig.maintenance.marks.is_pending
    assert rig.read(rig.old).display_state == "doubtful"


def test_retention_leaves_alone_what_is_being_published(tmp_path: Path, held: contextlib.ExitStack) -> None:
    """Its manifest may be in the store, and is written once more when that was not acknowledged."""
    rig = Rig(tmp_path / "run", held, verify=False)
    rig.maintenance.protect(CheckpointId(rig.old.attempt, rig.old.step))
    rig.published(rig.new)
    rig.wait()
    assert rig.is_listed(rig.old)
    assert (rig.root / rig.old.file).exists()
    rig.published(rig.old)
    rig.wait()
    assert not rig.is_listed(rig.old)


def test_retention_does_not_take_a_step_for_the_one_that_had_its_name(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    """A flusher outlives its job: the next one, which went back, publishes the same step under the same name."""
    rig = Rig(tmp_path / "run", held, verify=False)
    rig.published(rig.new)
    rig.wait()
    assert not rig.is_listed(rig.old)
    again = publish(rig.root, rig.old.step, {"x": torch.zeros(9)}, attempt=2, plain=True)
    assert again.file == rig.old.file
    rig.maintenance.protect(CheckpointId(2, again.step))
    newest = publish(rig.root, 3, {"x": torch.zeros(9)}, attempt=2)
    rig.published(newest)
    rig.wait()
    assert rig.is_listed(again), "its manifest was written, and is not acknowledged yet"
    assert (rig.root / again.file).exists()
    rig.published(again)
    rig.wait()
    assert not rig.is_listed(again), "now it is the older one of two"
    assert rig.is_listed(newest)


def test_a_training_that_always_writes_has_its_checkpoints_verified_and_removed(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    rig = Rig(tmp_path / "run", held, verify=True, waits_seconds_max=0.01)
    rig.maintenance.set_busy(busy=True)
    rig.published(rig.old, rig.new)
    rig.wait()
    assert not rig.is_listed(rig.old)
    kept = Manifest.from_bytes(rig.store.read(manifest_name(rig.new.file)), source=rig.new.file)
    assert kept.state is State.VERIFIED


def test_a_training_that_always_writes_piles_up_no_checkpoints(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    """Each is written while the one before is read: no read waits for a pause in the writing, which has no pauses."""
    rig = Rig(tmp_path / "run", held, verify=True)
    rig.maintenance.set_busy(busy=True)
    rig.published(rig.old, rig.new)
    for step in range(3, 40):
        newest = unread(rig.root, step)
        rig.maintenance.add_written(newest.image_bytes)
        rig.published(newest)
        wait_until(
            lambda: rig.listed() <= _PILE_MAX, SECONDS_MAX, f"{rig.listed()} checkpoints at step {step}"
        )
    rig.maintenance.set_busy(busy=False)
    rig.wait()
    assert rig.listed() == 1
    read_back = [item for item in rig.inbox.drain() if isinstance(item, ReadBack)]
    assert {item.state for item in read_back} == {State.VERIFIED}
    assert read_back[-1].key.step == newest.step


def test_superseded_checkpoints_are_removed_unread_once_a_newer_one_is_verified(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    rig = Rig(tmp_path / "run", held, verify=True)
    rig.maintenance.set_busy(busy=True)  # all are named before the first is read
    newer = [unread(rig.root, step) for step in (3, 4, 5)]
    rig.published(rig.old, rig.new, *newer)
    rig.maintenance.set_busy(busy=False)
    rig.wait()
    states = {item.key.step: item.state for item in rig.inbox.drain() if isinstance(item, ReadBack)}
    assert states == {1: State.VERIFIED, 5: State.VERIFIED}
    assert [manifest.step for manifest in (rig.old, rig.new, *newer) if rig.is_listed(manifest)] == [5]


def test_a_drifted_checkpoint_is_read_back_and_never_called_verified(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    rig = Rig(tmp_path / "run", held, verify=True)
    drifted = rig.new.model_copy(update={"drift": "rank 1 differs from most ranks in model/w"})
    (rig.root / manifest_name(drifted.file)).write_bytes(drifted.to_bytes())
    rig.published(rig.old, drifted)
    rig.wait()
    said = [
        (item.key.step, item.event, item.note) for item in rig.inbox.drain() if isinstance(item, ReadBack)
    ]
    assert said == [(1, "verified", ""), (2, "drifted", drifted.drift)]
    kept = Manifest.from_bytes(rig.store.read(manifest_name(drifted.file)), source=drifted.file)
    assert (kept.state, kept.note, kept.drift) == (State.DURABLE, READ_BACK, drifted.drift)
    assert rig.is_listed(rig.old), "restore prefers it"


def test_a_drifted_and_damaged_checkpoint_is_bad(tmp_path: Path, held: contextlib.ExitStack) -> None:
    rig = Rig(tmp_path / "run", held, verify=True)
    drifted = rig.new.model_copy(update={"drift": "rank 1 differs from most ranks in model/w"})
    (rig.root / manifest_name(drifted.file)).write_bytes(drifted.to_bytes())
    content = bytearray((rig.root / drifted.file).read_bytes())
    content[len(content) // 2] ^= 1
    (rig.root / drifted.file).write_bytes(content)
    rig.published(drifted)
    rig.wait()
    kept = Manifest.from_bytes(rig.store.read(manifest_name(drifted.file)), source=drifted.file)
    assert (kept.state, kept.is_drifted) == (State.BAD, False)


class _Diverged:
    """Maintenance of a run whose first checkpoint is finite, and all others are not."""

    def __init__(self, root: Path, held: contextlib.ExitStack, *, refuse: bool) -> None:
        self.root, self.steps = root, range(1, 8)
        root.mkdir()
        self.store, self.inbox = PosixStore(root), Inbox()
        held.callback(self.inbox.close)
        lease = WriterLease(self.store, 30.0)
        held.callback(lease.end)
        rules = MaintenanceRules(verify=True, keep=RetentionPolicy(3), refuse_nonfinite=refuse)
        context = FlusherContext(self.store, lease, self.inbox, EventLog(None, role="flusher"))
        self.maintenance = Maintenance(context, rules)
        held.callback(self.maintenance.stop)

    def _unread(self, step: int) -> Manifest:
        state = {"x": torch.full((9,), 1.0 if step == 1 else float("nan"))}
        durable = publish(self.root, step, state).model_copy(update={"state": State.DURABLE})
        (self.root / manifest_name(durable.file)).write_bytes(durable.to_bytes())
        return durable

    def look_after_all(self) -> list[ReadBack]:
        for step in self.steps:
            manifest = self._unread(step)
            self.maintenance.enqueue(CheckpointId(manifest.attempt, manifest.step), manifest)
            deadline = time.monotonic() + SECONDS_MAX
            while not self.maintenance.idle and time.monotonic() < deadline:
                time.sleep(0.005)
        return [item for item in self.inbox.drain() if isinstance(item, ReadBack)]

    def left(self) -> dict[int, Manifest]:
        found = {}
        for path in self.root.glob("step-*.json"):
            manifest = Manifest.from_bytes(path.read_bytes(), source=path.name)
            found[manifest.step] = manifest
        return found


def test_nan_is_counted_said_and_never_removes_the_newest_finite_checkpoint(
    tmp_path: Path, held: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    run = _Diverged(tmp_path / "run", held, refuse=False)
    said = run.look_after_all()
    assert [(item.state, item.nonfinite) for item in said] == [
        (State.VERIFIED, 0),
        *[(State.VERIFIED, 9)] * 6,
    ]
    left = run.left()
    assert sorted(left) == [1, 5, 6, 7]
    counted = left[7].nonfinite
    assert counted is not None
    assert (counted.values, counted.named) == (9, {"x": 9})
    assert "step 7 (attempt 1): 9 numbers are not finite (NaN or infinite), in x" in caplog.text


def test_where_nan_is_refused_such_a_checkpoint_is_bad_and_only_the_newest_stay(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    run = _Diverged(tmp_path / "run", held, refuse=True)
    said = run.look_after_all()
    assert [item.state for item in said] == [State.VERIFIED, *[State.BAD] * 6]
    left = run.left()
    assert {step: manifest.state for step, manifest in left.items()} == {
        1: State.VERIFIED,
        5: State.BAD,
        6: State.BAD,
        7: State.BAD,
    }
    assert "9 numbers are not finite" in left[7].note
    assert Catalog(run.store).get().step == 1


def test_a_store_without_room_loses_the_rungs_of_the_ladder_and_nothing_else(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    root = tmp_path / "run"
    for step in range(1, 6):
        created = f"2026-01-01T{step:02d}:00:00+00:00"
        manifest = publish(root, step, {"x": torch.zeros(9)}).model_copy(update={"created": created})
        (root / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
    store, inbox = PosixStore(root), Inbox()
    held.callback(inbox.close)
    lease = WriterLease(store, 30.0)
    held.callback(lease.end)
    context = FlusherContext(store, lease, inbox, EventLog(None, role="flusher"))
    maintenance = Maintenance(context, MaintenanceRules(verify=False, keep=RetentionPolicy(2, hourly=24)))
    held.callback(maintenance.stop)

    def wait() -> list[int]:
        deadline = time.monotonic() + SECONDS_MAX
        while not maintenance.idle and time.monotonic() < deadline:
            time.sleep(0.005)
        return sorted(int(path.name[5:14]) for path in root.glob("step-*.json"))

    newest = publish(root, 6, {"x": torch.zeros(9)})
    maintenance.enqueue(CheckpointId(newest.attempt, newest.step), newest)
    assert wait() == [1, 2, 3, 4, 5, 6]
    maintenance.make_room()
    assert wait() == [5, 6]


@pytest.mark.parametrize("verify", [True, False])
def test_a_checkpoint_that_the_supervisor_set_aside_is_not_removed(
    tmp_path: Path, held: contextlib.ExitStack, verify: bool
) -> None:
    rig = Rig(tmp_path, held, verify=verify, set_aside=[CheckpointId(1, 1)])
    rig.published(rig.old, rig.new)
    rig.wait()
    assert rig.is_listed(rig.old)
    assert rig.is_listed(rig.new)


def test_the_best_stay_through_a_restart_and_a_manifest_that_cannot_be_read_is_left_alone(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    """The second flusher knows nothing of the first but the store."""
    root, left = tmp_path / "run", list[list[int]]()

    def add(step: int, loss: float, state: State = State.DURABLE) -> Manifest:
        manifest = publish(root, step, {"x": torch.full((9,), float(step))})
        manifest = manifest.model_copy(update={"metrics": {"loss": loss}, "state": state})
        (root / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
        return manifest

    add(1, 0.1, State.VERIFIED)
    unreadable = root / manifest_name(add(2, 0.0, State.VERIFIED).file)
    whole = unreadable.read_bytes()
    unreadable.write_bytes(whole[:-9])
    for steps in ((3, 4), (5, 6)):
        store, inbox = PosixStore(root), Inbox()
        with contextlib.ExitStack() as flusher:
            flusher.callback(inbox.close)
            lease = WriterLease(store, 30.0)
            flusher.callback(lease.end)
            context = FlusherContext(store, lease, inbox, EventLog(None, role="flusher"))
            keep = RetentionPolicy(1, best=1, rule=BestRule(metric="loss", mode="min"))
            maintenance = Maintenance(context, MaintenanceRules(verify=True, keep=keep))
            flusher.callback(maintenance.stop)
            for step in steps:
                manifest = add(step, 0.5 + step)
                maintenance.enqueue(manifest.order, manifest)
                wait_until(lambda found=maintenance: found.idle, SECONDS_MAX, "it is not idle")  # type: ignore[misc]
        left.append(sorted(int(path.name[5:14]) for path in root.glob("step-*.pt")))
    assert left == [[1, 2, 4], [1, 2, 6]]
    unreadable.write_bytes(whole)
    assert Catalog(PosixStore(root)).get(2).metrics == {"loss": 0.0}


def test_a_flusher_names_slices_of_an_older_holdfast_once_and_leaves_them(
    tmp_path: Path, held: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    place = Rig(tmp_path, held, verify=True)
    old = "slices/step-000000009-a001-r00000of00001.slice"
    place.store.write(old, b"x")
    with caplog.at_level(logging.WARNING):
        place.maintenance.catch_up()
        place.wait()
    assert caplog.text.count("this run has 1 step only as slices written by an older holdfast") == 1
    assert place.store.read(old) == b"x"
