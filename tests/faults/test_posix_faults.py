"""A real flusher on a disk that is full, read-only, forbidden, broken or slow: staged steps wait and are not lost.

The causes are real where the machine allows it (a small file system that is full, mounted read-only, or without
permission); a shim that makes calls of the C library fail simulates hardware errors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.ring.journal import SlotState
from tests.faults.failing_disk import Calls, Disk
from tests.faults.flushing import FaultedFlusher, image_of, wait_until
from tests.support.flushers import watched
from tests.support.images import Image
from tests.support.stager_client import StagerClient

CHUNK_BYTES = 64 * 1024
IMAGE_BYTES = 640 * 1024
DISK_BYTES = 8 << 20
WITHOUT_OVERRIDE = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")

Start = Callable[..., FaultedFlusher]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "store", DISK_BYTES)
    yield disk
    disk.unmount()


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path / "calls", tmp_path / "store")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return image_of(tmp_path, 1, nbytes=IMAGE_BYTES, chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with watched(tmp_path, partial(FaultedFlusher, tmp_path, str(tmp_path / "store" / "run"))) as start:
        yield start


def check_published(flusher: FaultedFlusher, image: Image, *steps: int) -> None:
    """Check that exactly these steps are published, equal byte for byte, and that no temporary file is left."""
    assert flusher.visible() == [f"step-{step:09d}.{end}" for step in steps for end in ("json", "pt")]
    assert flusher.hidden() == []
    for step in steps:
        assert (flusher.store / f"step-{step:09d}.pt").read_bytes() == image.final
        assert flusher.manifest(step)["state"] == "verified"


def full_slots(stager: StagerClient, step: int) -> int:
    """Number of chunks of a step in the ring."""
    records = (stager.ring.record(slot) for slot in range(stager.ring.ring_chunks))
    return sum(record.state is SlotState.FULL and record.step == step for record in records)


class Trouble:
    """One fault of a disk, and its repair."""

    def __init__(self, begin: Callable[[], None], mend: Callable[[], None], *words: str) -> None:
        self.begin, self.mend, self.words = begin, mend, words


@pytest.fixture(params=["full", "read-only", "permission", "quota", "broken device"])
def trouble(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Trouble, dict[str, Any]]]:
    """The fault, and the options of a flusher that meets it."""
    store = tmp_path / "store"
    disk = Disk(store, DISK_BYTES)
    temporary = store / "run" / ".holdfast" / "tmp"
    needed = (r"\d+ bytes are needed", r"\d+ are free", "remove old checkpoints")
    try:
        if request.param == "full":
            yield (
                Trouble(
                    lambda: disk.fill(free_bytes=100_000), disk.make_room, "No space left|too full", *needed
                ),
                {},
            )
        elif request.param == "read-only":
            yield Trouble(disk.make_read_only, disk.make_writable, "Read-only", "mount it for writing"), {}
        elif request.param == "permission":
            words: tuple[str, ...] = ("Permission denied", "write permission")
            yield (
                Trouble(lambda: temporary.chmod(0o500), lambda: temporary.chmod(0o700), *words),
                {"prefix": WITHOUT_OVERRIDE},
            )
        else:
            calls = Calls(tmp_path / "calls", store)
            number = errno.EDQUOT if request.param == "quota" else errno.ENXIO
            words = ("Disk quota exceeded", *needed) if request.param == "quota" else ("device", "mounted")
            yield (
                Trouble(lambda: calls.fail("pwrite", number), calls.clear, *words),
                {"env": calls.environment},
            )
    finally:
        disk.unmount()


def test_staged_steps_wait_in_the_ring_until_the_disk_takes_them(
    start: Start, trouble: tuple[Trouble, dict[str, Any]], image: Image
) -> None:
    what, how = trouble
    flusher = start(**how)
    stager = StagerClient(flusher.directory)
    with contextlib.closing(stager):
        stager.save(image, 5)
        stager.wait("durable", step=5)
        stager.wait("verified", step=5)
        what.begin()
        stager.save(image, 6)
        held = flusher.wait_for_event("flush_held", step=6)
        assert_named(held["message"], flusher.store, what.words)
        assert_named(flusher.log.read_text(), flusher.store, what.words)
        assert full_slots(stager, 6) > 0
        assert [m for m in stager.heard if m.kind == "failed"] == []
        what.mend()
        stager.wait("durable", step=6)
        flusher.wait_for_event("flush_resumed", step=6)
        stager.save(image, 7)
        stager.finish()
        assert [m for m in stager.heard if m.kind in {"failed", "bad"}] == []
    assert flusher.wait() == 0
    check_published(flusher, image, 5, 6, 7)
    assert not flusher.directory.exists()


def assert_named(text: str, path: Path, words: tuple[str, ...]) -> None:
    """Check that the text has the path, the cause, and the remedy."""
    for word in (re.escape(str(path)), *words):
        assert re.search(word, text), f"{word} is not in: {text}"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
@pytest.mark.parametrize("call", ["pwrite", "rename", "link", "preadv"])
def test_an_error_that_may_go_away_is_waited_out(
    start: Start, calls: Calls, image: Image, call: str, number: int
) -> None:
    flusher = start(env=calls.environment)
    with contextlib.closing(StagerClient(flusher.directory)) as stager:
        calls.fail(call, number, times=3)
        stager.save(image, 5)
        stager.wait("durable", step=5)
        stager.save(image, 6)
        stager.finish()
        assert [m for m in stager.heard if m.kind in {"failed", "bad"}] == []
    assert flusher.wait() == 0
    check_published(flusher, image, 5, 6)
    log = flusher.log.read_text()
    assert log.count("attempt 1") >= 1, log
    assert str(flusher.store) in log


@pytest.mark.parametrize("later", ["flusher", "job"])
def test_told_to_end_while_held_it_leaves_the_ring_and_says_how_to_go_on(
    start: Start, disk: Disk, image: Image, later: str
) -> None:
    first = start()
    with contextlib.closing(StagerClient(first.directory)) as stager:
        disk.fill(free_bytes=100_000)
        stager.save(image, 5)
        first.wait_for_event("flush_held", step=5)
        # By then the flusher knows that the step is whole: a step that is still being received is no reason to fail.
        wait_until(lambda: "(failure 2)" in first.log.read_text(), first.log.read_text)
    first.process.terminate()
    assert first.wait() == 4
    assert (first.directory / "ring").exists()
    assert_named(first.log.read_text(), first.store, ("holdfast flusher --store", r"\d+ bytes are needed"))
    assert first.visible() == []
    disk.make_room()

    second = start()
    assert second.said["ready"], second.said
    second.wait_for_event("durable", step=5)
    if later == "job":
        with contextlib.closing(StagerClient(second.directory)) as stager:
            stager.save(image, 6)
            stager.finish()
    else:
        second.process.terminate()
    assert second.wait() == 0
    names = ["step-000000005", *(["step-000000006-a002"] if later == "job" else [])]
    assert second.visible() == [f"{name}.{end}" for name in names for end in ("json", "pt")]
    assert second.hidden() == []
    for name in names:
        assert (second.store / f"{name}.pt").read_bytes() == image.final
    assert not second.directory.exists()


def test_told_to_end_again_and_again_while_it_ends_it_gives_all_back(start: Start, image: Image) -> None:
    flusher = start()
    with contextlib.closing(StagerClient(flusher.directory)) as stager:
        stager.save(image, 5)
        flusher.wait_for_event("durable", step=5)
        stager.finish()
    deadline = time.monotonic() + 60
    while flusher.process.poll() is None:
        assert time.monotonic() < deadline, flusher.log.read_text()
        flusher.process.terminate()
        time.sleep(0.001)
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000005.json", "step-000000005.pt"]
    assert flusher.hidden() == []
    assert not flusher.directory.exists()


def test_a_flusher_whose_stager_went_while_it_held_goes_on_by_itself(
    start: Start, disk: Disk, image: Image
) -> None:
    flusher = start()
    with contextlib.closing(StagerClient(flusher.directory)) as stager:
        disk.fill(free_bytes=100_000)
        stager.save(image, 5)
        flusher.wait_for_event("flush_held", step=5)
    flusher.wait_for_event("stager_gone")
    assert flusher.process.poll() is None
    disk.make_room()
    assert flusher.wait() == 0
    check_published(flusher, image, 5)
    assert not flusher.directory.exists()


def test_a_ring_that_is_full_of_held_steps_takes_no_more_and_loses_none(
    start: Start, disk: Disk, image: Image
) -> None:
    flusher = start(ring="2MiB")
    with contextlib.closing(StagerClient(flusher.directory)) as stager:
        disk.fill(free_bytes=100_000)
        steps = range(5, 5 + stager.ring.ring_chunks // image.layout.chunks)
        assert len(steps) >= 2
        for step in steps:
            stager.save(image, step)
        flusher.wait_for_event("flush_held", step=5)
        stager.begin(image, 99)
        stager.send(image, 99, range(stager.ring.ring_chunks % image.layout.chunks))
        states = [stager.ring.state(slot) for slot in range(stager.ring.ring_chunks)]
        assert SlotState.FREE not in states, "the ring has room: nothing was to be seen"
        stager.channel.send("abort", attempt=stager.attempt, step=99, reason="no slot")
        stager.wait("failed", step=99)
        disk.make_room()
        for step in steps:
            stager.wait("durable", step=step)
        stager.finish()
    assert flusher.wait() == 0
    check_published(flusher, image, *steps)


def test_after_a_failed_sync_nothing_with_holes_is_published(
    start: Start, calls: Calls, image: Image
) -> None:
    """Data that the kernel accepted and could not write is lost, and a second sync would report success."""
    flusher = start("--heartbeat-seconds", "60", env=calls.environment)
    with contextlib.closing(StagerClient(flusher.directory)) as stager:
        stager.save(image, 5)
        stager.wait("verified", step=5)
        calls.fail("fsync", errno.EIO, times=1, named="step-000000006.pt")
        stager.save(image, 6)
        failed = stager.wait("failed", step=6).fields["message"]
        assert_named(failed, flusher.store / "step-000000006.pt", ("sync failed", "Input/output error"))
        stager.save(image, 7)
        stager.finish()
    assert flusher.wait() == 0
    check_published(flusher, image, 5, 7)


def test_a_file_that_was_lost_before_any_chunk_left_the_ring_is_written_anew(
    start: Start, calls: Calls, image: Image
) -> None:
    """The server forgets the handle, and another process has removed the temporary file."""
    flusher = start(env=calls.environment)
    temporary = flusher.store / ".holdfast" / "tmp"
    with contextlib.closing(StagerClient(flusher.directory)) as stager:
        calls.fail("pwrite", errno.EIO, named="step-000000005.pt")
        stager.save(image, 5)
        wait_until(lambda: "Input/output error" in flusher.log.read_text(), flusher.log.read_text)
        assert full_slots(stager, 5) == image.layout.chunks
        for path in temporary.iterdir():
            path.unlink()
        calls.fail("pwrite", errno.ESTALE, times=1, named="step-000000005.pt")
        stager.wait("durable", step=5)
        stager.finish()
        assert [m for m in stager.heard if m.kind in {"failed", "bad"}] == []
    assert flusher.wait() == 0
    check_published(flusher, image, 5)
    assert "start over" in flusher.log.read_text()


def test_a_slow_disk_fills_the_ring_and_takes_no_other_memory(
    start: Start, calls: Calls, image: Image
) -> None:
    calls.fail("pwrite", 0, delay_ms=30)
    flusher = start("--keep-hourly", "0", "--keep-daily", "0", env=calls.environment)
    steps = range(5, 10)
    with contextlib.closing(StagerClient(flusher.directory)) as stager:
        before_bytes = most_bytes = flusher.resident_bytes()
        free_least = stager.ring.ring_chunks
        for step in steps:
            stager.begin(image, step)
            for chunk in range(image.layout.chunks):
                stager.send(image, step, [chunk])
                states = [stager.ring.state(slot) for slot in range(stager.ring.ring_chunks)]
                free_least = min(free_least, states.count(SlotState.FREE))
            most_bytes = max(most_bytes, flusher.resident_bytes())
            stager.staged(image, step)
        stager.finish()
        assert [m for m in stager.heard if m.kind in {"failed", "bad"}] == []
    assert flusher.wait() == 0
    assert free_least == 0, "the disk was not slow enough to fill the ring"
    assert most_bytes - before_bytes < 32 << 20
    check_published(flusher, image, *steps[-3:])


def test_full_disks_under_the_events_and_the_log_stop_nothing(
    start: Start, tmp_path: Path, image: Image
) -> None:
    disk = Disk(tmp_path / "notes", 1 << 20)
    try:
        events, log = disk.place / "events.jsonl", disk.place / "flusher.log"
        flusher = start("--keep-hourly", "0", "--keep-daily", "0", events=events, stderr=log)
        with contextlib.closing(StagerClient(flusher.directory)) as stager:
            stager.save(image, 5)
            stager.wait("verified", step=5)
            disk.fill(free_bytes=0)
            for step in range(6, 30):  # each step writes more than fits in the files' last pages
                stager.save(image, step)
                stager.wait("verified", step=step)
            disk.make_room()
            stager.save(image, 30)
            stager.finish()
            assert [m for m in stager.heard if m.kind in {"failed", "bad"}] == []
        assert flusher.wait() == 0
        check_published(flusher, image, 28, 29, 30)
        # Lines without room are missing; a piece of the line that was cut may be left.
        whole, torn = read_events(events)
        steps = {line["step"] for line in whole if line["event"] == "durable"}
        assert {5, 30} <= steps
        assert 20 not in steps
        assert len(torn) <= 1
    finally:
        disk.unmount()


def read_events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Lines that are JSON, and lines that are not."""
    whole, torn = [], []
    for line in path.read_text().splitlines():
        try:
            whole.append(json.loads(line))
        except ValueError:
            torn.append(line)
    return whole, torn
