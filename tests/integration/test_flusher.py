"""A real flusher process on a real directory, with real files of `torch.save`, and a simulated stager."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.ring.ring_keeper import RingKeeper
from holdfast.store import open_store
from holdfast.store.spare_room import writes_in_place
from tests.support.cluster import wait_until
from tests.support.flushers import watched
from tests.support.images import Image, from_torch_file
from tests.support.stager_client import FlusherProcess, StagerClient

CHUNK_BYTES = 64 * 1024
RANKS = 3

Start = Callable[..., FlusherProcess]
Attach = Callable[..., StagerClient]


@pytest.fixture
def attach() -> Iterator[Attach]:
    attached: list[StagerClient] = []

    def one(directory: Path, *, seed: int = 0, attempt: int = 0) -> StagerClient:
        attached.append(StagerClient(directory, seed=seed, attempt=attempt))
        return attached[-1]

    yield one
    for stager in attached:
        stager.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with watched(tmp_path, partial(FlusherProcess, tmp_path)) as start:
        yield start


def state(seed: int, *, rows: int = 400) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"layer.{n}": torch.randn(rows, 101) for n in range(4)} | {"step": torch.tensor(seed)}


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return image_of(tmp_path, 1)


def image_of(tmp_path: Path, seed: int, *, rows: int = 400) -> Image:
    path = tmp_path / f"original-{seed}-{rows}.pt"
    torch.save(state(seed, rows=rows), path)
    return from_torch_file(path, chunk_bytes=CHUNK_BYTES, ranks=RANKS)


def assert_holds(path: Path, seed: int, *, rows: int = 400) -> None:
    assert zipfile.ZipFile(path).testzip() is None
    got, want = torch.load(path, weights_only=True), state(seed, rows=rows)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def assert_loads_without_holdfast(path: Path, seed: int, *, rows: int = 400) -> None:
    """Load the file in a process that cannot import holdfast."""
    code = (
        "import sys, torch; torch.manual_seed(int(sys.argv[2]));"
        "want = {f'layer.{n}': torch.randn(int(sys.argv[3]), 101) for n in range(4)};"
        "got = torch.load(sys.argv[1], weights_only=True);"
        "assert all(torch.equal(got[name], tensor) for name, tensor in want.items())"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(seed), str(rows)], check=True, cwd="/")
    subprocess.run([sys.executable, "-m", "zipfile", "-t", str(path)], check=True, stdout=subprocess.DEVNULL)


def test_checkpoints_become_files_that_torch_loads_and_the_flusher_leaves_nothing_behind(
    start: Start, attach: Attach, tmp_path: Path, image: Image
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    assert stager.welcome["store_url"] == str(flusher.store)
    assert stager.welcome["attempt"] == 1
    stager.save(image, 5)
    second = image_of(tmp_path, 2)
    stager.save(second, 10)
    durable = stager.wait("durable", step=5).fields
    assert durable["file"] == "step-000000005.pt"
    assert durable["pgt2_seconds"] >= 2.0
    stager.wait("verified", step=5)
    stager.finish()
    assert [m.kind for m in stager.heard if m.kind in {"failed", "bad"}] == []
    assert flusher.wait() == 0

    assert (flusher.store / "step-000000005.pt").read_bytes() == image.final
    assert_loads_without_holdfast(flusher.store / "step-000000010.pt", 2)
    assert flusher.visible() == [
        "step-000000005.json",
        "step-000000005.pt",
        "step-000000010.json",
        "step-000000010.pt",
    ]
    assert flusher.hidden() == []
    assert not flusher.directory.exists()
    manifest = flusher.manifest(10)
    assert (manifest["state"], manifest["attempt"], manifest["run"]) == ("verified", 1, "run")
    assert manifest["ranks"] == RANKS
    assert manifest["layout_digest"] == second.layout.digest
    assert 2.0 <= manifest["pgt1_seconds"] <= manifest["pgt2_seconds"]
    assert manifest["record"]["flusher"].keys() >= {"verify_seconds", "write_seconds", "publish_seconds"}
    assert set(manifest["record"]["ranks"]) == {"0", "1", "2"}
    claim = json.loads((flusher.store / ".holdfast" / "writer-000001.json").read_text())
    assert claim["released"] is True


def test_an_image_larger_than_the_ring_streams_through_it(
    start: Start, attach: Attach, tmp_path: Path
) -> None:
    flusher = start("--no-verify", ring="512KiB")
    large = image_of(tmp_path, 3, rows=2500)
    assert large.layout.chunks > 7 * 8
    stager = attach(flusher.directory)
    assert stager.welcome["ring_chunks"] == 8
    stager.save(large, 1)
    stager.finish()
    assert flusher.wait() == 0
    assert_holds(flusher.store / "step-000000001.pt", 3, rows=2500)
    assert flusher.manifest(1)["state"] == "durable"


def test_a_flipped_byte_is_named_and_never_published_and_the_next_step_is_fine(
    start: Start, attach: Attach, image: Image
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    entry = next(e for e in image.layout.entries if e.name.endswith("/data/1"))
    middle = entry.offset + entry.nbytes // 2
    stager.save(image, 5, flip=(middle // CHUNK_BYTES, middle % CHUNK_BYTES))
    failed = stager.wait("failed", step=5).fields
    assert failed["code"] == "damage"
    assert "state/1" in failed["message"]
    assert f"chunk {middle // CHUNK_BYTES} from rank" in failed["message"]
    assert flusher.visible() == []
    stager.save(image, 6)
    stager.finish()
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000006.json", "step-000000006.pt"]
    assert flusher.hidden() == []


def test_stager_that_dies_leaves_what_was_staged_and_nothing_partial(
    start: Start, attach: Attach, image: Image
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    stager.save(image, 5)
    stager.begin(image, 6)
    stager.send(image, 6, [0, 2])
    stager.ring.mark_filling(stager.free_slot(), 1, 6, 3)
    stager.close()
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000005.json", "step-000000005.pt"]
    assert flusher.hidden() == []
    assert flusher.manifest(5)["state"] == "verified"
    (gone,) = flusher.happened("flush_failed")
    assert gone["step"] == 6
    assert gone["code"] == "peer_lost"


def test_a_staged_checkpoint_in_the_ring_survives_a_killed_flusher(
    start: Start, attach: Attach, tmp_path: Path, image: Image
) -> None:
    first = start()
    stager = attach(first.directory)
    first.freeze()  # this flusher takes nothing more out of the ring
    stager.save(image, 5)
    stager.begin(image, 6)
    stager.send(image, 6, [0])
    first.kill()
    assert first.visible() == []
    second = start("--linger")
    assert second.said["attempt"] == 2
    stager.close()
    again = attach(second.directory)  # a new job: the ranks that sent step 6 are gone
    assert again.welcome["resumed"] is False
    assert again.attempt == 2
    again.save(image, 7)
    again.finish()
    assert_holds(second.store / "step-000000005.pt", 1)
    steps = ("step-000000005", "step-000000007-a002")
    assert second.visible() == [f"{step}.{kind}" for step in steps for kind in ("json", "pt")]
    assert second.manifest(5)["attempt"] == 1
    assert [line["step"] for line in second.happened("recovered")] == [5]
    assert [line["step"] for line in second.happened("flush_failed")] == [6]
    ring = Ring.attach(second.directory)
    assert all(ring.state(slot) is SlotState.FREE for slot in range(ring.ring_chunks))
    ring.close()
    assert second.hidden() == []


def replay(stager: StagerClient, known: StagerClient, image: Image, step: int, *, staged: bool) -> None:
    """Send the messages of a stager to a flusher that has kept its ring."""
    attempt = known.attempt
    stager.channel.send("begin", attempt=attempt, step=step, layout_digest=image.layout.digest)
    for slot in range(known.ring.ring_chunks):
        record = known.ring.record(slot)
        if record.state is SlotState.FULL and record.step == step:
            stager.channel.send("chunk", slot=slot)
    if staged:
        stager.channel.send("staged", attempt=attempt, step=step)


LIVES_OF_A_PART = ["part_begun", "part_written", "part_recorded"]


@pytest.mark.parametrize(
    "point",
    [f"{point}#{number}" for point in LIVES_OF_A_PART for number in (1, 4)]
    + ["parts_done", "file_named", "file_published", "manifest_written"],
)
def test_a_flusher_that_is_killed_anywhere_costs_no_staged_checkpoint_and_writes_nothing_twice(
    start: Start, attach: Attach, image: Image, point: str
) -> None:
    first = start(fault=f"flusher@{point}=kill")
    stager = attach(first.directory)
    stager.tells = {"begin", "chunk"}
    directory = first.directory
    stager.begin(image, 5)
    stager.send(image, 5, range(image.layout.chunks))
    stager.tells = None
    stager.staged(image, 5)
    first.wait_killed()
    record = directory / "flush-1-5"
    recorded = record.read_bytes().count(b'"part"') if record.exists() else 0

    twice = start(fault="flusher@recovering=kill")
    twice.wait_killed()
    second = start()
    back = attach(second.directory, attempt=1)
    assert back.welcome["resumed"] is True
    assert back.attempt == 1
    replay(back, stager, image, 5, staged=True)
    replay(back, stager, image, 5, staged=True)  # a repeated message has no effect
    back.wait("durable", step=5)
    back.save(image, 6)  # the ring still works
    back.finish()
    assert second.wait() == 0
    assert [message.kind for message in back.heard if message.kind in {"failed", "bad"}] == []
    assert (second.store / "step-000000005.pt").read_bytes() == image.final
    assert second.manifest(5)["state"] == "verified"
    assert second.visible() == [f"step-{step:09d}.{kind}" for step in (5, 6) for kind in ("json", "pt")]
    assert second.hidden() == []
    assert not second.directory.exists()
    told = second.manifest(5)["record"]["flusher"]
    if point != "manifest_written":
        parts = image.layout.chunks  # each part of a file is one chunk
        assert told.get("parts_resumed", 0) == recorded
        assert told.get("parts_written", 0) == parts - recorded
    stager.close()


def test_a_checkpoint_that_is_still_received_goes_on_with_the_next_flusher(
    start: Start, attach: Attach, image: Image
) -> None:
    first = start(fault="flusher@part_recorded#2=kill")
    stager = attach(first.directory)
    stager.begin(image, 5)
    stager.send(image, 5, range(4))
    first.wait_killed()
    filling = stager.free_slot()
    stager.ring.mark_filling(filling, 1, 5, 4)
    second = start()
    back = attach(second.directory, attempt=1)
    assert back.welcome["resumed"] is True
    assert back.ring.state(filling) is SlotState.FILLING  # its writer is alive
    replay(back, stager, image, 5, staged=False)
    data = image.chunk_bytes(4)
    back.ring.slot_memory(filling)[: len(data)] = data
    back.ring.mark_full(filling, image.sources(4), len(data))
    back.channel.send("chunk", slot=filling)
    back.send(image, 5, range(5, image.layout.chunks))
    back.staged(image, 5)
    back.finish()
    assert second.wait() == 0
    assert (second.store / "step-000000005.pt").read_bytes() == image.final
    assert second.manifest(5)["record"]["flusher"]["parts_resumed"] == 2
    stager.close()


def test_a_flush_that_ended_without_a_stager_is_told_to_the_next_one(
    start: Start, attach: Attach, image: Image
) -> None:
    first = start(fault="flusher@manifest_written=kill")
    stager = attach(first.directory)
    stager.save(image, 5)
    first.wait_killed()
    stager.ring.remove_checkpoint(1, 5)  # as if the stager had died before it sent the message
    second = start()
    back = attach(second.directory, attempt=1)
    replay(back, stager, image, 5, staged=True)
    assert back.wait("durable", step=5).fields["file"] == "step-000000005.pt"
    replay(back, stager, image, 6, staged=True)
    assert "given up" in back.wait("failed", step=6).fields["message"]
    back.begin(image, 7)
    back.send(image, 7, [0])
    back.channel.send("abort", attempt=1, step=7, reason="given up meanwhile")
    back.wait("failed", step=7)
    back.finish()
    assert second.wait() == 0
    assert second.hidden() == []
    stager.close()


def test_a_read_back_or_a_removal_that_was_cut_short_is_finished_by_the_next_flusher(
    start: Start, attach: Attach, image: Image
) -> None:
    first = start("--keep-last", "1", fault="flusher@manifest_deleted=kill")
    stager = attach(first.directory)
    stager.save(image, 1)
    stager.wait("verified", step=1)
    stager.save(image, 2)
    first.wait_killed()
    stager.close()
    assert "step-000000001.pt" in first.visible()
    assert "step-000000001.json" not in first.visible()
    second = start("--keep-last", "1", fault="flusher@verifying#3=kill")
    back = attach(second.directory)
    assert second.visible() == ["step-000000002.json", "step-000000002.pt"]
    back.save(image, 3)
    second.wait_killed()
    back.close()
    third = start("--keep-last", "0")
    again = attach(third.directory)
    again.finish()
    assert third.wait() == 0
    for step in (2, 3):
        assert third.manifest(step)["state"] == "verified"


def _kept_alone(flusher: FlusherProcess, stager: StagerClient, step: int) -> None:
    """Wait until a step is verified and the previous one is reduced to its room; its name goes two fsyncs earlier."""
    stager.wait("verified", step=step)
    wait_until(lambda: len(flusher.happened("pruned")) == step - 1, 30.0, "the one before was not removed")


@pytest.mark.parametrize("point", ["file_retired", "room_taken"])
def test_a_flusher_that_dies_with_the_room_of_an_old_checkpoint_costs_none(
    start: Start, attach: Attach, tmp_path: Path, point: str
) -> None:
    if not writes_in_place(tmp_path):
        pytest.skip(f"{tmp_path} is not on ext4 or XFS: no room is used again there")
    first = start("--keep-last", "1", fault=f"flusher@{point}#2=kill")
    stager = attach(first.directory)
    for step in range(1, 5):  # step 3's verification keeps the second room, which step 4 takes
        stager.save(image_of(tmp_path, step), step)
        if point == "file_retired" and step == 3:
            break
        if step < 4:
            _kept_alone(first, stager, step)
    first.wait_killed()
    stager.close()
    newest = 4 if point == "room_taken" else 3
    second = start("--keep-last", "1")
    back = attach(second.directory)
    back.finish()
    assert second.wait() == 0
    assert second.visible() == [f"step-{newest:09d}.json", f"step-{newest:09d}.pt"]
    assert_holds(second.store / f"step-{newest:09d}.pt", newest)
    assert second.manifest(newest)["state"] == "verified"
    assert second.hidden() == []


def test_each_checkpoint_is_written_into_the_room_of_the_one_before(
    start: Start, attach: Attach, tmp_path: Path
) -> None:
    if not writes_in_place(tmp_path):
        pytest.skip(f"{tmp_path} is not on ext4 or XFS: no room is used again there")
    for reuse in ("--reuse", "--no-reuse"):
        flusher = start("--keep-last", "1", reuse)
        stager = attach(flusher.directory)
        rooms: list[bytes | None] = []
        for step in range(1, 5):
            rows = 400 + 50 * step
            stager.save(image_of(tmp_path, step, rows=rows), step)
            _kept_alone(flusher, stager, step)
            path = flusher.store / f"step-{step:09d}.pt"
            # The mark follows the room, not the name; the number of a deleted inode may be reused.
            marks = os.listxattr(path)
            rooms.append(os.getxattr(path, "user.step") if "user.step" in marks else None)
            os.setxattr(path, "user.step", str(step).encode())
        assert rooms == [None, None, *((b"1", b"2") if reuse == "--reuse" else (None, None))]
        assert_holds(path, step, rows=rows)
        stager.finish()
        assert flusher.wait() == 0
        assert flusher.hidden() == []
        shutil.rmtree(flusher.store)
        flusher.events.unlink()


@pytest.mark.parametrize("how", ["terminate", "held_seconds_max"])
def test_a_store_that_takes_nothing_keeps_the_ring_for_the_next_flusher(
    start: Start, attach: Attach, image: Image, how: str
) -> None:
    first = start("--held-seconds-max", "0.5" if how != "terminate" else "3600")
    stager = attach(first.directory)
    hidden = first.store / ".holdfast" / "tmp"
    stager.save(image, 4)
    stager.wait("verified", step=4)
    blocked = first.store / "step-000000005.json"
    blocked.mkdir()  # blocks the manifest: not even root can rename a file over a directory
    stager.save(image, 5)
    until = time.monotonic() + 60
    while not first.happened("flush_held"):
        assert time.monotonic() < until
        time.sleep(0.05)
    stager.close()
    if how == "terminate":
        first.process.terminate()
    assert first.wait() == 4
    assert (first.directory / "checkpoint-1-5.json").exists()
    blocked.rmdir()
    second = start()
    attach(second.directory).finish()
    assert second.wait() == 0
    assert (second.store / "step-000000005.pt").read_bytes() == image.final
    assert second.manifest(5)["state"] == "verified"
    assert list(hidden.iterdir()) == []


def test_a_damaged_ring_does_not_keep_the_next_flusher_from_starting(start: Start) -> None:
    first = start()
    first.freeze()
    with (first.directory / "journal").open("r+b") as file:
        file.write(b"garbage!")
    first.kill()
    second = start("--linger")
    assert second.said["ready"] is True
    assert len(second.happened("ring_lost")) == 1


def test_a_second_flusher_of_the_same_run_is_refused_and_names_the_first(
    start: Start, attach: Attach, image: Image
) -> None:
    first = start()
    second = start()
    assert second.wait() == 8
    assert second.said["error"]["code"] == "fenced"
    assert str(first.process.pid) in second.said["error"]["message"]
    stager = attach(first.directory)
    stager.save(image, 1)
    stager.finish()
    assert first.wait() == 0


def test_a_second_stager_is_refused_and_names_the_first(start: Start, attach: Attach, image: Image) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    with pytest.raises(AssertionError, match="is already the stager of this run"):
        attach(flusher.directory)
    stager.save(image, 1)
    stager.finish()


def test_start_up_errors_say_why_and_give_the_exit_code(start: Start, tmp_path: Path) -> None:
    broken = start(ring="1KiB")
    assert broken.wait() == 2
    assert broken.said["error"]["code"] == "config"
    assert "ring_bytes" in broken.said["error"]["message"]
    assert broken.said["error"]["help"].startswith("holdfast explain config ")
    (tmp_path / "store").write_text("a file where a directory should be")
    broken = start()
    assert broken.wait() == 4
    assert str(tmp_path / "store") in broken.said["error"]["message"]


def test_sigterm_publishes_what_is_staged_and_leaves_the_rest_to_the_next_flusher(
    start: Start, attach: Attach, image: Image
) -> None:
    first = start("--linger")
    stager = attach(first.directory)
    stager.save(image, 5)
    stager.begin(image, 6)
    stager.send(image, 6, [1])
    stager.wait("began", step=6)
    first.process.terminate()
    assert first.wait() == 0
    assert first.visible() == ["step-000000005.json", "step-000000005.pt"]
    assert first.manifest(5)["attempt"] == 1
    assert [line["receiving"] for line in first.happened("ring_left")] == [1]
    second = start()
    back = attach(second.directory, attempt=1)
    assert back.welcome["resumed"] is True
    replay(back, stager, image, 6, staged=False)
    back.send(image, 6, [chunk for chunk in range(image.layout.chunks) if chunk != 1])
    back.staged(image, 6)
    back.finish()
    assert second.wait() == 0
    assert (second.store / "step-000000006.pt").read_bytes() == image.final
    assert second.hidden() == []
    assert not second.directory.exists()
    stager.close()


def test_an_aborted_step_gives_its_slots_back(start: Start, attach: Attach, image: Image) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    for step in range(6):  # more chunks in total than the ring holds
        stager.begin(image, step)
        stager.send(image, step, range(5))
        stager.channel.send("abort", attempt=1, step=step, reason="rank 2 declined")
        assert "rank 2 declined" in stager.wait("failed", step=step).fields["message"]
    stager.save(image, 9)
    stager.finish()
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000009.json", "step-000000009.pt"]
    assert flusher.hidden() == []


def test_retention_keeps_the_last_and_every_kth(start: Start, attach: Attach, image: Image) -> None:
    flusher = start("--keep-last", "2", "--keep-every", "4")
    stager = attach(flusher.directory)
    for step in range(1, 9):
        stager.save(image, step)
        stager.wait("durable", step=step)
    stager.finish()
    assert flusher.wait() == 0
    kept = [f"step-{step:09d}.{kind}" for step in (4, 7, 8) for kind in ("json", "pt")]
    assert flusher.visible() == kept


@pytest.mark.parametrize("why", ["linger", "keeper"])
def test_a_lingering_flusher_gives_the_next_job_its_own_attempt_and_overwrites_nothing(
    start: Start, attach: Attach, tmp_path: Path, image: Image, why: str
) -> None:
    flusher = start(*(["--linger"] if why == "linger" else []))
    keeper = RingKeeper(flusher.directory) if why == "keeper" else None
    stager = attach(flusher.directory)
    stager.save(image, 5)
    stager.finish()
    other = image_of(tmp_path, 2)
    again = attach(flusher.directory)
    assert again.attempt == 2
    again.save(other, 5)
    assert again.wait("durable", step=5).fields["file"] == "step-000000005-a002.pt"
    again.save(other, 5)
    assert "already published" in again.wait("failed", step=5).fields["message"]
    again.finish()
    assert (flusher.store / "step-000000005.pt").read_bytes() == image.final
    assert (flusher.store / "step-000000005-a002.pt").read_bytes() == other.final
    if keeper is not None:
        keeper.close()
    else:
        flusher.process.terminate()
    assert flusher.wait() == 0
    assert not flusher.directory.exists()


def test_a_kept_flusher_does_not_leave_a_store_that_takes_nothing(
    start: Start, attach: Attach, image: Image
) -> None:
    flusher = start("--held-seconds-max", "0.01")
    keeper = RingKeeper(flusher.directory)
    blocked = flusher.store / "step-000000005.json"
    blocked.mkdir(parents=True)
    stager = attach(flusher.directory)
    stager.save(image, 5)
    wait_until(lambda: bool(flusher.happened("flush_held")), 60, "nothing is held")
    stager.close()
    wait_until(lambda: bool(flusher.happened("stager_gone")), 60, "the stager was not missed")
    again = attach(flusher.directory)
    blocked.rmdir()
    again.finish()
    assert flusher.manifest(5)["state"] == "verified"
    keeper.close()
    assert flusher.wait() == 0


@pytest.mark.parametrize("what", ["kind", "attempt", "json"])
def test_a_stager_that_breaks_the_protocol_counts_as_gone(
    start: Start, attach: Attach, image: Image, what: str
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    stager.save(image, 5)
    if what == "kind":
        stager.channel.send("drained")
    elif what == "attempt":
        stager.channel.send("staged", attempt=7, step=5)
    else:
        stager.channel._socket.send(b"{")
    stager.wait("refused")
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000005.json", "step-000000005.pt"]


def test_another_writer_that_took_the_run_over_ends_this_one(
    start: Start, attach: Attach, image: Image
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    other = Identity("elsewhere", "boot", "namespace", 7, 1)
    Lease.acquire(open_store(str(flusher.store)), takeover=True, identity=other)
    stager.save(image, 5)
    refused = stager.wait("refused").fields
    assert refused["code"] == "fenced"
    assert "elsewhere" in refused["message"]
    assert flusher.wait() == 8
    assert flusher.visible() == []


def test_the_journal_is_believed_when_messages_were_lost(start: Start, attach: Attach, image: Image) -> None:
    flusher = start(ring="2MiB")
    stager = attach(flusher.directory)
    stager.tells = set()
    stager.save(image, 5)  # complete in the ring, but without a message
    stager.tells = {"begin"}
    stager.save(image, 6)
    stager.close()
    assert flusher.wait() == 0
    assert flusher.visible() == [f"step-{step:09d}.{kind}" for step in (5, 6) for kind in ("json", "pt")]
    assert (flusher.store / "step-000000006.pt").read_bytes() == image.final


def test_the_claim_shows_a_sign_of_life_while_nothing_happens(start: Start) -> None:
    flusher = start("--heartbeat-seconds", "0.05", "--linger")
    claim = flusher.store / ".holdfast" / "writer-000001.json"
    until = time.monotonic() + 30
    while json.loads(claim.read_text())["beat"] < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    flusher.process.terminate()
    assert flusher.wait() == 0
    assert json.loads(claim.read_text())["released"] is True
