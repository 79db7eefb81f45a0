"""A flusher freezes right before an operation on the store, another host takes the run over, then the flusher wakes.

    host A: saves steps 5, 6, 7 ─► SIGSTOP after checking the claim, before the n-th operation that others can see
    host B:                             takes the run over, saves the same steps, reads them back, ends
    host A:                                                                                        SIGCONT ─► fenced

Whatever A still does, each object of B's attempt stays the same, byte by byte, and restore takes B's newest. In some
cells a rank of A finds a fourth step torn meanwhile: A's stager withdraws the step, which is never published. In others
the rank doubts the first two: A may not mark them any more, and restore never offers them as good.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.verification import verify_file
from holdfast.faultpoint import FIRED_VARIABLE, VARIABLE
from holdfast.image.manifest import State, manifest_name
from holdfast.ring.journal import SlotState
from holdfast.store import open_store
from holdfast.store.base import Store
from tests.faults.flushing import FaultedFlusher, image_of, wait_until
from tests.support import other_host_site
from tests.support.fsspec_site import sitecustomize as fsspec_driver
from tests.support.images import Image
from tests.support.job import REPOSITORY
from tests.support.stager_client import StagerClient

__all__ = [
    "ELSEWHERE_CELLS",
    "FREEZE_CELLS",
    "STEPS",
    "FreezeCell",
    "check_winner",
    "clear_away",
    "freeze_parameters",
    "host",
    "objects",
    "opened",
    "play_freeze",
    "take_over",
]

CHUNK_BYTES, IMAGE_BYTES = 64 << 10, 200_000
STEPS = (5, 6, 7)
ACTS = 11
"""Host A's flusher always does these operations: file, manifest and verdict of three steps, and removal of the manifest
and the file of the step that is not kept; the order of the last ones depends on timing."""


TORN_STEP = 8


class FreezeCell(NamedTuple):
    """One run.

    Attributes:
        number: The operation before which A freezes.
        torn: Whether a step is withdrawn meanwhile, half received.
        doubted: Whether two steps turn out to be doubtful meanwhile.
    """

    store: str
    number: int
    torn: bool = False
    doubted: bool = False

    @property
    def act(self) -> str:
        """Its row in the table."""
        meanwhile = ", a torn step withdrawn meanwhile" if self.torn else ""
        return f"act {self.number}{', steps doubted meanwhile' if self.doubted else meanwhile}"

    @property
    def name(self) -> str:
        """In test ids and results."""
        return f"{self.act} on {self.store}"

    @property
    def regular(self) -> bool:
        """Whether `make check` runs it: before a file's name, a manifest, a removal."""
        return self.name in _REGULAR


_REGULAR = {
    "act 2 on NFS semantics",
    "act 2 on fsspec",
    "act 1 on directory",
    "act 2 on directory",
    "act 10 on directory",
    "act 2, a torn step withdrawn meanwhile on directory",
    "act 7, steps doubted meanwhile on directory",
    "act 4 on S3",
}
FREEZE_CELLS = (
    *(FreezeCell(store, number) for number in range(1, ACTS + 1) for store in ("directory", "S3")),
    *(FreezeCell(store, number, torn=True) for number in (2, 7) for store in ("directory", "S3")),
    *(FreezeCell(store, number, doubted=True) for number in (2, 7) for store in ("directory", "S3")),
)


ELSEWHERE_CELLS = tuple(
    FreezeCell(store, number) for number in (1, 2, 4, 10) for store in ("NFS semantics", "fsspec")
)
"""On stores with weaker guarantees: answers are lost and listings lag, or only fsspec's guarantees hold."""


def freeze_parameters(cells: Iterable[FreezeCell]) -> list[object]:
    """Cells for pytest.mark.parametrize."""
    return [
        pytest.param(cell, id=cell.name, marks=[pytest.mark.s3] if cell.store == "S3" else [])
        for cell in cells
    ]


def play_freeze(cell: FreezeCell, request: pytest.FixtureRequest, directory: Path) -> None:
    """Play one cell at a fresh run."""
    url, env = _place(cell.store, request, directory)
    ours = [image_of(directory, seed, nbytes=IMAGE_BYTES, chunk_bytes=CHUNK_BYTES) for seed in (1, 2)]
    fired = directory / "fired"
    fired.mkdir()
    fault = f"flusher@claim_seen#{cell.number}"
    with (
        host(directory, "a", url, fault=f"{fault}=stop", fired=fired, env=env) as frozen,
        contextlib.closing(StagerClient(frozen.directory)) as stager,
    ):
        for step in STEPS:
            stager.save(ours[0], step)
        if cell.torn:  # half of it has come, with the sender's CRCs of the torn copy
            torn = image_of(directory, 3, nbytes=IMAGE_BYTES, chunk_bytes=CHUNK_BYTES)
            stager.begin(torn, TORN_STEP)
            stager.send(torn, TORN_STEP, range(torn.layout.chunks // 2))
        process = psutil.Process(frozen.process.pid)
        wait_until(
            lambda: (fired / fault).exists() and process.status() == psutil.STATUS_STOPPED,
            lambda: f"{fault} was never reached: {frozen.log.read_text()[-3000:]}",
        )
        if cell.torn:
            stager.abort(TORN_STEP, "rank 1: torn: a tensor was changed while it was copied")
        if cell.doubted:
            stager.doubt(*STEPS[:2])
        take_over(directory, url, ours[1], env)
        with contextlib.closing(opened(url)) as closing:
            before = objects(closing.store, "-a002")
            os.kill(frozen.process.pid, signal.SIGCONT)
            assert frozen.process.wait(90) == 8, frozen.log.read_text()[-3000:]
            check_winner(closing.store, before)
    doubted = [(1, step) for step in STEPS[:2]] if cell.doubted else []
    clear_away(directory, url, before, env, doubted=doubted)


def _place(store: str, request: pytest.FixtureRequest, directory: Path) -> tuple[str, dict[str, str]]:
    """A fresh run's URL, and the variables that its flushers need."""
    path = directory / "store" / "run"
    match store:
        case "S3":
            return request.getfixturevalue("swift_s3").url(), {}
        case "NFS semantics":
            return str(path), {"TEST_ALSO": "tests.support.nfs_semantics", "TEST_NFS": str(path.parent)}
        case "fsspec":
            return f"elsewhere://{path}", {"TEST_ALSO": fsspec_driver.__name__}
        case _:
            return str(path), {}


def clear_away(
    directory: Path,
    url: str,
    before: dict[str, bytes],
    env: Mapping[str, str] | None = None,
    *,
    doubted: Collection[tuple[int, int]] = (),
) -> None:
    """Check that a third flusher removes exactly the first one's leftovers; its own empty ring goes too."""
    with host(directory, "a", url, env=env) as third:
        with contextlib.closing(StagerClient(third.directory)) as stager:
            assert {stager.ring.state(slot) for slot in range(stager.ring.ring_chunks)} == {SlotState.FREE}
            stager.finish()
        assert third.process.wait(90) == 0
        assert not third.directory.exists()
    with contextlib.closing(opened(url)) as closing:
        check_winner(closing.store, before)
        items = [item.manifest for item in Catalog(closing.store).list() if item.manifest]
        assert {manifest.step for manifest in items} <= set(STEPS), "a torn step was published"
        good = [one for one in items if (one.attempt, one.step) in doubted and not one.doubt]
        assert not good, "a doubtful step is offered as good"
        listed = {manifest.file for manifest in items}
        names = {info.name for info in closing.store.list() if not info.name.startswith(".holdfast/writer-")}
        expected = listed | {manifest_name(file) for file in listed}
        assert names == expected, sorted(names ^ expected)


def take_over(directory: Path, url: str, image: Image, env: Mapping[str, str] | None = None) -> None:
    with host(directory, "b", url, "--keep-last", "0", env=env) as winner:
        assert winner.said["attempt"] == 2
        with contextlib.closing(StagerClient(winner.directory)) as stager:
            for step in STEPS:
                stager.save(image, step)
                stager.wait("verified", step=step)
            stager.finish()
        assert winner.process.wait(90) == 0


@contextlib.contextmanager
def host(
    directory: Path,
    name: str,
    url: str,
    *options: str,
    fault: str = "",
    fired: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[FaultedFlusher]:
    """A flusher on a host of this name, with a memory of its own."""
    base = directory / name
    base.mkdir(exist_ok=True)
    site = Path(other_host_site.__path__[0])
    env = {"PYTHONPATH": f"{site}:{REPOSITORY}", "TEST_HOST": name, VARIABLE: fault, **(env or {})}
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


def opened(url: str) -> _Opened:
    store = open_store(url)
    return _Opened(store, getattr(store, "close", lambda: None))


def objects(store: Store, attempt: str) -> dict[str, bytes]:
    return {info.name: store.read(info.name) for info in store.list() if attempt in info.name}


def check_winner(store: Store, before: dict[str, bytes]) -> None:
    assert len(before) == 2 * len(STEPS)
    assert objects(store, "-a002") == before
    newest = Catalog(store).get()
    assert (newest.attempt, newest.step, newest.state) == (2, STEPS[-1], State.VERIFIED)
    for item in Catalog(store).list():
        assert item.manifest is not None, item.fault
        assert not item.fault, item.fault
        assert verify_file(store, item.manifest).ok
