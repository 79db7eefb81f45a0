"""A flusher stands still right before an act on the store, another host takes the run over, then it wakes.

    host A: saves steps 5, 6, 7 ─► SIGSTOP after its look at the claim, before the n-th act that others can see
    host B:                             takes the run over, saves the same steps, reads them back, ends
    host A:                                                                                        SIGCONT ─► fenced

Whatever A still does, each object of B's attempt is what it was, byte by byte, and restore takes B's newest.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.verification import verify_file
from holdfast.faultpoint import FIRED_VARIABLE, VARIABLE
from holdfast.image.manifest import State, manifest_name
from holdfast.store import open_store
from holdfast.store.base import Store
from tests.faults.flushing import FaultedFlusher, image_of, wait_until
from tests.support import other_host_site
from tests.support.images import Image
from tests.support.job import REPOSITORY
from tests.support.stager_client import StagerClient

__all__ = ["ACTS", "FreezeCell", "play_freeze"]

CHUNK_BYTES, IMAGE_BYTES = 64 << 10, 200_000
STEPS = (5, 6, 7)
ACTS = 11
"""So many acts the flusher of host A always comes to: of three steps the file, the manifest and the verdict, and of the
one that is not kept the manifest and the file go; the order of the last ones depends on who is faster."""


class FreezeCell(NamedTuple):
    """One run. `number`: at which act A stands still."""

    store: str
    number: int

    @property
    def name(self) -> str:
        """In test ids."""
        return f"act {self.number} on {self.store}"


def play_freeze(cell: FreezeCell, url: str, directory: Path) -> None:
    """Play one cell at a fresh run."""
    ours = [image_of(directory, seed, nbytes=IMAGE_BYTES, chunk_bytes=CHUNK_BYTES) for seed in (1, 2)]
    fired = directory / "fired"
    fired.mkdir()
    fault = f"flusher@claim_seen#{cell.number}"
    with (
        _host(directory, "a", url, fault=f"{fault}=stop", fired=fired) as frozen,
        contextlib.closing(StagerClient(frozen.directory)) as stager,
    ):
        for step in STEPS:
            stager.save(ours[0], step)
        process = psutil.Process(frozen.process.pid)
        wait_until(
            lambda: (fired / fault).exists() and process.status() == psutil.STATUS_STOPPED,
            lambda: f"{fault} was never reached: {frozen.log.read_text()[-3000:]}",
        )
        _take_over(directory, url, ours[1])
        with contextlib.closing(_opened(url)) as closing:
            before = _objects(closing.store, "-a002")
            os.kill(frozen.process.pid, signal.SIGCONT)
            assert frozen.process.wait(90) == 8, frozen.log.read_text()[-3000:]
            _check(closing.store, before)
    # A third one clears away what the first has left half done, and nothing else.
    with _host(directory, "a", url) as third:
        with contextlib.closing(StagerClient(third.directory)) as stager:
            stager.finish()
        assert third.process.wait(90) == 0
    with contextlib.closing(_opened(url)) as closing:
        _check(closing.store, before)
        listed = {item.manifest.file for item in Catalog(closing.store).list() if item.manifest}
        names = {info.name for info in closing.store.list() if not info.name.startswith(".holdfast/writer-")}
        expected = listed | {manifest_name(file) for file in listed}
        assert names == expected, sorted(names ^ expected)


def _take_over(directory: Path, url: str, image: Image) -> None:
    with _host(directory, "b", url, "--keep-last", "0") as winner:
        assert winner.said["attempt"] == 2
        with contextlib.closing(StagerClient(winner.directory)) as stager:
            for step in STEPS:
                stager.save(image, step)
                stager.wait("verified", step=step)
            stager.finish()
        assert winner.process.wait(90) == 0


@contextlib.contextmanager
def _host(
    directory: Path, host: str, url: str, *options: str, fault: str = "", fired: Path | None = None
) -> Iterator[FaultedFlusher]:
    """A flusher on a host of this name, with a memory of its own."""
    base = directory / host
    base.mkdir(exist_ok=True)
    site = Path(other_host_site.__path__[0])
    env = {"PYTHONPATH": f"{site}:{REPOSITORY}", "TEST_HOST": host, VARIABLE: fault}
    if fired is not None:
        env[FIRED_VARIABLE] = str(fired)
    options = (*("--keep-last", "2"), *options, "--heartbeat-seconds", "0.5")
    flusher = FaultedFlusher(base, url, *options, env=env)
    try:
        yield flusher
    finally:
        if flusher.process.poll() is None:
            flusher.kill()
        assert flusher.process.stdout is not None
        flusher.process.stdout.close()
    assert "Traceback" not in flusher.log.read_text()


class _Opened(NamedTuple):
    store: Store
    close: Callable[[], None]


def _opened(url: str) -> _Opened:
    store = open_store(url)
    return _Opened(store, getattr(store, "close", lambda: None))


def _objects(store: Store, attempt: str) -> dict[str, bytes]:
    return {info.name: store.read(info.name) for info in store.list() if attempt in info.name}


def _check(store: Store, before: dict[str, bytes]) -> None:
    assert len(before) == 2 * len(STEPS)
    assert _objects(store, "-a002") == before
    newest = Catalog(store).get()
    assert (newest.attempt, newest.step, newest.state) == (2, STEPS[-1], State.VERIFIED)
    for item in Catalog(store).list():
        assert item.manifest is not None, item.fault
        assert not item.fault, item.fault
        assert verify_file(store, item.manifest).ok
