"""A ring without a configured size grows with the first checkpoint, and a death during the growth loses nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast.ring.journal import SlotState
from tests.support.flushers import watched
from tests.support.images import Image, from_torch_file
from tests.support.stager_client import FlusherProcess, StagerClient

CHUNK_BYTES = 4 << 20
AT_FIRST, GROWN = 64, 82  # twice 37 chunks, and 8

Start = Callable[..., FlusherProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with watched(tmp_path, partial(FlusherProcess, tmp_path, chunk="4MiB", ring="")) as start:
        yield start


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    path = tmp_path_factory.mktemp("image") / "original.pt"
    torch.manual_seed(1)
    torch.save({f"layer.{n}": torch.randn(36, 1 << 18) for n in range(4)}, path)
    made = from_torch_file(path, chunk_bytes=CHUNK_BYTES, ranks=2)
    assert made.layout.chunks == 37
    return made


def fill(stager: StagerClient, image: Image, step: int, chunk: int, slot: int) -> None:
    data = image.chunk_bytes(chunk)
    stager.ring.mark_filling(slot, stager.attempt, step, chunk)
    stager.ring.slot_memory(slot)[: len(data)] = data
    stager.ring.mark_full(slot, image.sources(chunk), len(data))
    stager.channel.send("chunk", slot=slot)


def note(stager: StagerClient) -> str:
    """Wait for the flusher's note at the end of the growth, and return it."""
    deadline = time.monotonic() + 60
    while True:
        said: list[str] = [message.fields["note"] for message in stager.heard if message.kind == "grown"]
        if any(said):
            return next(text for text in said if text)
        assert time.monotonic() < deadline
        stager.heard += stager.channel.poll()
        time.sleep(0.01)


def test_the_ring_grows_to_hold_two_checkpoints_and_its_new_slots_carry_chunks(
    start: Start, image: Image
) -> None:
    flusher = start()
    stager = StagerClient(flusher.directory)
    assert stager.welcome["ring_chunks"] == AT_FIRST
    stager.begin(image, 5)
    assert note(stager) == "the ring has 0.3 GiB now, room for two checkpoints"
    assert stager.ring.refresh_slots() == range(AT_FIRST, GROWN)
    for number, slot in enumerate(range(AT_FIRST, GROWN)):
        fill(stager, image, 5, number, slot)
    stager.send(image, 5, range(GROWN - AT_FIRST, image.layout.chunks))
    stager.staged(image, 5)
    stager.wait("verified", step=5)
    stager.finish()
    assert flusher.wait() == 0
    assert (flusher.store / "step-000000005.pt").read_bytes() == image.final
    (told,) = flusher.happened("ring_grown")
    assert told["ring_bytes"] == (GROWN) * CHUNK_BYTES
    assert not flusher.directory.exists()


@pytest.mark.parametrize("how", ["killed", "frozen, then killed", "frozen, then awake"])
def test_a_flusher_may_die_or_stop_between_taking_memory_and_telling_of_it(
    start: Start, image: Image, how: str
) -> None:
    first = start(fault=f"flusher@ring_taken={'kill' if how == 'killed' else 'stop'}")
    stager = StagerClient(first.directory)
    stager.begin(image, 5)
    stager.send(image, 5, range(10))
    if how == "killed":
        first.wait_killed()
    else:
        wait_until_stopped(first)
        assert (first.directory / "ring").stat().st_size == (GROWN) * CHUNK_BYTES
        assert not stager.ring.refresh_slots()
    if how == "frozen, then awake":
        first.process.send_signal(signal.SIGCONT)
        second, back = first, stager
    else:
        if first.process.poll() is None:
            first.kill()
        second = start()
        back = StagerClient(second.directory, attempt=1)
        assert back.welcome["resumed"] is True
        assert back.welcome["ring_chunks"] == AT_FIRST
        back._tell("begin", attempt=1, step=5, layout_digest=image.layout.digest)
        for record in back.ring.records():
            if record.state is SlotState.FULL:
                back.channel.send("chunk", slot=record.slot)
    assert note(back)
    assert back.ring.refresh_slots() == range(AT_FIRST, GROWN)
    fill(back, image, 5, 10, GROWN - 1)
    back.send(image, 5, range(11, image.layout.chunks))
    back.staged(image, 5)
    back.finish()
    assert second.wait() == 0
    assert (second.store / "step-000000005.pt").read_bytes() == image.final
    stager.close()


def test_slots_of_which_no_stager_was_told_are_those_of_the_next_flusher(start: Start, image: Image) -> None:
    first = start(fault="flusher@ring_added=kill")
    stager = StagerClient(first.directory)
    stager.begin(image, 5)
    first.wait_killed()
    assert not [message for message in stager.heard if message.kind == "grown"]
    assert stager.ring.refresh_slots() == range(AT_FIRST, GROWN)
    fill(stager, image, 5, 0, GROWN - 1)  # recorded only in the journal
    second = start()
    back = StagerClient(second.directory, attempt=1)
    assert back.welcome["ring_chunks"] == GROWN
    back._tell("begin", attempt=1, step=5, layout_digest=image.layout.digest)
    back.channel.send("chunk", slot=GROWN - 1)
    back.send(image, 5, range(1, image.layout.chunks))
    back.staged(image, 5)
    back.finish()
    assert second.wait() == 0
    assert (second.store / "step-000000005.pt").read_bytes() == image.final
    stager.close()


def wait_until_stopped(flusher: FlusherProcess) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{flusher.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_size_that_was_set_is_kept(start: Start, image: Image) -> None:
    flusher = start(ring="48MiB")
    stager = StagerClient(flusher.directory)
    stager.save(image, 5)
    stager.finish()
    assert flusher.wait() == 0
    assert stager.welcome["ring_chunks"] == 12
    assert not [message for message in stager.heard if message.kind == "grown"]
    assert (flusher.store / "step-000000005.pt").read_bytes() == image.final
