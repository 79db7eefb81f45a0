"""A bit flips in the ring of a real flusher process: that checkpoint is dropped by name, and the next one is fine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import DamageError
from holdfast.ring.journal import SlotState
from holdfast.store.posix import PosixStore
from tests.rot.flips import flips
from tests.support.images import Image, from_torch_file
from tests.support.stager_client import FlusherProcess, StagerClient

CHUNK_BYTES = 64 * 1024
RANKS = 2
ROUNDS = 6


@pytest.fixture
def flusher(tmp_path: Path) -> Iterator[FlusherProcess]:
    started = FlusherProcess(tmp_path, "--keep-last", "0")
    yield started
    if started.process.poll() is None:
        started.kill()
    assert started.process.stdout is not None
    started.process.stdout.close()


def _image(directory: Path, seed: int) -> Image:
    torch.manual_seed(seed)
    torch.save({"weight": torch.randn(500, 101), "bias": torch.randn(7)}, directory / "image.pt")
    return from_torch_file(directory / "image.pt", chunk_bytes=CHUNK_BYTES, ranks=RANKS)


def test_a_flip_while_the_flusher_holds_the_chunk(flusher: FlusherProcess, tmp_path: Path) -> None:
    stager = StagerClient(flusher.directory)
    try:
        stager.save(_image(tmp_path, 1), 1)
        stager.wait("verified", step=1)
        image = _image(tmp_path, 2)
        entry = max(image.layout.entries, key=lambda entry: entry.nbytes)
        for step, flip in enumerate(flips("process", entry.nbytes, ROUNDS), start=2):
            stager.begin(image, step)
            stager.wait("began", step=step)
            flusher.freeze()  # until SIGCONT the flusher can read neither messages nor the ring
            stager.send(image, step, range(image.layout.chunks))
            stager.staged(image, step)
            chunk, offset = divmod(entry.offset + flip.offset, CHUNK_BYTES)
            slots = [n for n in range(stager.ring.ring_chunks) if stager.ring.state(n) is SlotState.FULL]
            slot = next(n for n in slots if stager.ring.record(n).chunk == chunk)
            stager.ring.slot_memory(slot)[offset] ^= flip.mask
            flusher.process.send_signal(signal.SIGCONT)
            failed = stager.wait("failed", step=step).fields
            assert failed["code"] == DamageError.code
            assert f"step {step} " in failed["message"]
            assert f"chunk {chunk} from rank" in failed["message"]
            assert "state/" in failed["message"], "the tensor is not named"
            assert flusher.visible() == ["step-000000001.json", "step-000000001.pt"]
        last = ROUNDS + 2
        stager.save(image, last)
        stager.wait("verified", step=last)
        stager.finish()
    finally:
        stager.close()
    assert flusher.wait() == 0
    assert (flusher.store / f"step-{last:09d}.pt").read_bytes() == image.final
    assert [item.step for item in Catalog(PosixStore(flusher.store)).list()] == [last, 1]
    assert flusher.hidden() == [], "leftovers of what was given up"
