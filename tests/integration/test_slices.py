"""Slices that ranks wrote to the store, made into files by a real flusher and `holdfast assemble`, killed anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast.checkpoints.lease import Lease
from holdfast.checkpoints.slice_sets import SliceName, find_sets, layout_name
from holdfast.image.layout import CHUNK_BYTES
from holdfast.image.manifest import Manifest, State, manifest_name
from holdfast.image.slices import frames_of
from holdfast.store import open_store
from tests.support.flushers import watched
from tests.support.images import Image, from_torch_file
from tests.support.stager_client import FlusherProcess, StagerClient
from tests.support.store_slices import write_slices

HOLDFAST = Path(sys.executable).with_name("holdfast")
RANKS = 3
SECONDS_MAX = 100
RUN_AND_TELL = """
import pathlib, re, sys
from holdfast.command.cli import main
try:
    main(sys.argv[1:])
finally:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
"""

Start = Callable[..., FlusherProcess]


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return image_of(tmp_path, 1)


def image_of(directory: Path, seed: int) -> Image:
    torch.manual_seed(seed)
    path = directory / f"original-{seed}.pt"
    torch.save({f"layer.{n}": torch.randn(400, 101) for n in range(4)} | {"step": torch.tensor(seed)}, path)
    return from_torch_file(path, chunk_bytes=64 << 10, ranks=RANKS)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose first attempt is over."""
    path = tmp_path / "store" / "run"
    Lease.take(open_store(str(path))).release()
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with watched(tmp_path, partial(FlusherProcess, tmp_path)) as start:
        yield start


def holdfast(*arguments: object, fault: str = "") -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    if fault:
        clean["HOLDFAST_FAULT"] = fault
    return subprocess.run(
        [str(HOLDFAST), *map(str, arguments)],
        env=clean,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def put(run_dir: Path, image: Image, *, attempt: int, step: int, ranks: list[int] | None = None) -> None:
    write_slices(open_store(str(run_dir)), image, attempt=attempt, step=step, ranks=ranks)


def manifest_at(run_dir: Path, file: str) -> Manifest:
    return Manifest.from_bytes((run_dir / manifest_name(file)).read_bytes(), source=file)


def check_file(run_dir: Path, image: Image, file: str, order: tuple[int, int]) -> None:
    """The file is that of the image, verified, and good for whoever has never heard of holdfast."""
    assert (run_dir / file).read_bytes() == image.final
    manifest = manifest_at(run_dir, file)
    assert (manifest.order, manifest.state) == (order, State.VERIFIED)
    code = "import sys, torch; print(sorted(torch.load(sys.argv[1], weights_only=True)))"
    environment = {"PATH": os.environ["PATH"]}
    subprocess.run(
        [sys.executable, "-I", "-c", code, str(run_dir / file)], check=True, env=environment, cwd="/"
    )
    subprocess.run(["unzip", "-tq", str(run_dir / file)], check=True, stdout=subprocess.DEVNULL)


def leftovers(run_dir: Path) -> list[str]:
    return [path.name for path in (run_dir / ".holdfast" / "tmp").glob("*")]


def slices_in(run_dir: Path) -> list[tuple[tuple[int, int], int, int]]:
    """(order, seals, slices) of each set."""
    sets = find_sets(open_store(str(run_dir)).list())
    return [(found.order, len(found.seals), len(found.slices)) for found in sets]


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_verified(run_dir: Path, file: str) -> bool:
    return (run_dir / manifest_name(file)).exists() and manifest_at(run_dir, file).state is State.VERIFIED


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_makes_the_file_and_removes_the_slices(
    run_dir: Path, image: Image, tmp_path: Path
) -> None:
    put(run_dir, image_of(tmp_path, 2), attempt=1, step=4)
    put(run_dir, image, attempt=1, step=5)
    put(run_dir, image, attempt=1, step=6, ranks=[0, 2])
    listed = json.loads(holdfast("ls", run_dir, "--json").stdout)
    assert listed["checkpoints"] == []
    assert [(one["step"], one["state"], one["sealed"], one["ranks"]) for one in listed["slices"]] == [
        (6, "partial", 2, 3),
        (5, "slices", 3, 3),
        (4, "slices", 3, 3),
    ]
    shown = holdfast("ls", run_dir).stdout
    assert "slices" in shown
    assert "2 of 3 slices" in shown
    made = holdfast("assemble", run_dir, "--json")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["assembled"] == {
        "step": 5,
        "attempt": 1,
        "file": "step-000000005.pt",
        "nbytes": image.layout.image_bytes,
        "crc32": manifest_at(run_dir, "step-000000005.pt").image_crc32,
        "state": "verified",
    }
    assert len(document["removed"]) == 2 * 2 * RANKS
    check_file(run_dir, image, "step-000000005.pt", (1, 5))
    assert slices_in(run_dir) == [((1, 6), 2, 2)], "a newer one may yet become complete"
    assert leftovers(run_dir) == []
    again = holdfast("assemble", run_dir)
    assert (again.returncode, again.stdout) == (5, "")
    assert "2 of 3 ranks have sealed" in again.stderr
    assert holdfast("pull", f"{run_dir}@5", tmp_path / "x.pt").returncode == 0


def test_a_step_that_is_there_as_slices_alone_is_put_together_as_it_is_pulled(
    run_dir: Path, image: Image, tmp_path: Path
) -> None:
    """The newest set is damaged: without a step the one before it comes, and the store stays as it is."""
    other = image_of(tmp_path, 2)
    put(run_dir, image, attempt=1, step=4)
    put(run_dir, other, attempt=1, step=5)
    damaged = run_dir / SliceName(1, 5, 1, RANKS).slice
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    before = slices_in(run_dir)
    for wanted in (run_dir, f"{run_dir}@4"):
        pulled = holdfast("pull", wanted, tmp_path / "x.pt", "--force", "--json")
        assert pulled.returncode == 0, pulled.stderr
        said = json.loads(pulled.stdout)
        assert (said["step"], said["nbytes"]) == (4, image.layout.image_bytes)
        assert zlib.crc32((tmp_path / "x.pt").read_bytes()) == said["crc32"]
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    original = torch.load(tmp_path / "original-1.pt", weights_only=True)
    assert all(torch.equal(loaded[name], original[name]) for name in original)
    refused = holdfast("pull", f"{run_dir}@5", tmp_path / "y.pt")
    assert refused.returncode == 6
    assert "rank 1" in refused.stderr
    assert not list(tmp_path.glob("*y.pt*"))
    assert slices_in(run_dir) == before
    assert leftovers(run_dir) == []


@pytest.mark.parametrize(
    ("command", "mebibytes", "chunk_bytes", "window_bytes"),
    [("pull", 96, 1 << 20, 32 << 20), ("assemble", 200, CHUNK_BYTES, 64 << 20)],
)
def test_no_memory_is_taken_for_the_state(
    tmp_path: Path, command: str, mebibytes: int, chunk_bytes: int, window_bytes: int
) -> None:
    """A file is made of slices through a window of a few chunks, whatever its size."""
    peaks = []
    for size in (1, mebibytes):
        path, run_dir = tmp_path / f"{size}.pt", tmp_path / f"run-{size}"
        torch.save({"w": torch.zeros(size << 18)}, path)
        image = from_torch_file(path, chunk_bytes=chunk_bytes, ranks=RANKS)
        put(run_dir, image, attempt=1, step=5)
        words = [str(run_dir), str(tmp_path / f"pulled-{size}.pt")][: 2 if command == "pull" else 1]
        # Not what wait4 says: that begins with what this process had when it forked.
        done = subprocess.run(
            [sys.executable, "-c", RUN_AND_TELL, command, *words],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=True,
        )
        peaks.append(int(done.stdout.splitlines()[-1]) << 10)
        if command == "assemble":
            assert manifest_at(run_dir, "step-000000005.pt").state is State.VERIFIED
    assert peaks[1] - peaks[0] < window_bytes, peaks


def test_a_step_by_its_number_and_slices_that_are_kept(run_dir: Path, image: Image, tmp_path: Path) -> None:
    other = image_of(tmp_path, 2)
    put(run_dir, other, attempt=1, step=4)
    put(run_dir, image, attempt=1, step=5)
    assert holdfast("assemble", f"{run_dir}@4", "--keep-slices").returncode == 0
    check_file(run_dir, other, "step-000000004.pt", (1, 4))
    assert slices_in(run_dir) == [((1, 5), 3, 3), ((1, 4), 3, 3)]
    assert holdfast("assemble", run_dir).returncode == 0
    assert slices_in(run_dir) == []
    missing = holdfast("assemble", f"{run_dir}@9")
    assert missing.returncode == 5
    assert "no slices of step 9" in missing.stderr


def test_a_living_writer_is_not_disturbed(run_dir: Path, image: Image) -> None:
    put(run_dir, image, attempt=1, step=5)
    claim = Lease.take(open_store(str(run_dir)))
    try:
        refused = holdfast("assemble", run_dir)
    finally:
        claim.release()
    assert refused.returncode == 8
    assert slices_in(run_dir) == [((1, 5), 3, 3)]


@pytest.mark.parametrize(
    "where", ["slices_read#2", "file_named", "image_named", "image_listed", "seal_deleted#2"]
)
def test_a_command_that_is_killed_anywhere_is_run_again(run_dir: Path, image: Image, where: str) -> None:
    put(run_dir, image, attempt=1, step=4)
    put(run_dir, image, attempt=1, step=5)
    killed = holdfast("assemble", run_dir, fault=f"tool@{where}=kill")
    assert killed.returncode == -signal.SIGKILL
    listed = json.loads(holdfast("ls", run_dir, "--json").stdout)
    assert [one["step"] for one in listed["checkpoints"]] in ([], [5])
    assert {one["step"] for one in listed["slices"] if one["state"] == "slices"} | {
        one["step"] for one in listed["checkpoints"]
    } >= {5}, "the newest step is gone"
    again = holdfast("assemble", run_dir)
    assert again.returncode in ((0, 5) if where.startswith("seal_deleted") else (0,)), again.stderr
    check_file(run_dir, image, "step-000000005.pt", (1, 5))
    assert leftovers(run_dir) == []
    assert [order for order, seals, _ in slices_in(run_dir) if seals == RANKS and order == (1, 5)] == []


def test_a_damaged_set_is_named_and_the_one_before_it_is_taken(run_dir: Path, image: Image) -> None:
    put(run_dir, image, attempt=1, step=4)
    put(run_dir, image, attempt=1, step=5)
    bad = run_dir / SliceName(1, 5, 1, RANKS).slice
    data = bytearray(bad.read_bytes())
    data[frames_of(image.layout, 1)[1].offset + 9] ^= 4
    bad.write_bytes(data)
    asked = holdfast("assemble", f"{run_dir}@5")
    assert asked.returncode == 6
    assert str(bad) in asked.stderr
    assert "layer" in asked.stderr or "state/" in asked.stderr, "the tensors are not named"
    assert leftovers(run_dir) == []
    assert not list(run_dir.glob("step-*"))
    made = holdfast("assemble", run_dir)
    assert made.returncode == 0
    assert str(bad) in made.stderr
    check_file(run_dir, image, "step-000000004.pt", (1, 4))
    assert slices_in(run_dir) == [((1, 5), 3, 3)], "what is damaged is for people to look at"


# -- the flusher ---------------------------------------------------------------------------------------------------


def test_the_next_flusher_makes_the_file_and_clears_away_when_its_own_job_has_one(
    run_dir: Path, image: Image, tmp_path: Path, start: Start
) -> None:
    other = image_of(tmp_path, 2)
    put(run_dir, other, attempt=1, step=4)
    put(run_dir, image, attempt=1, step=5)
    put(run_dir, image, attempt=1, step=6, ranks=[1])
    (run_dir / ".holdfast" / "tmp").mkdir(exist_ok=True)
    left = (
        run_dir
        / ".holdfast"
        / "tmp"
        / "slice-a001-r00002-00ff-slices_step-000000006-a001-r00002of00003.slice"
    )
    left.write_bytes(b"half")
    flusher = start()
    wait_until(lambda: is_verified(run_dir, "step-000000005.pt"))
    check_file(run_dir, image, "step-000000005.pt", (1, 5))
    assert left.exists(), "the job of attempt 1 may live"
    assert slices_in(run_dir) == [((1, 6), 1, 1), ((1, 5), 3, 3), ((1, 4), 3, 3)]
    stager = StagerClient(flusher.directory)
    try:
        assert stager.welcome["attempt"] == 2
        wait_until(lambda: slices_in(run_dir) == [((1, 5), 3, 3), ((1, 4), 3, 3)])
        wait_until(lambda: not left.exists())
        stager.save(other, 6)
        stager.wait("verified", step=6)
        stager.finish()
    finally:
        stager.close()
    assert flusher.wait() == 0
    assert slices_in(run_dir) == []
    assert (run_dir / "step-000000006-a002.pt").read_bytes() == other.final
    events = [json.loads(line) for line in flusher.events.read_text().splitlines()]
    (assembled,) = [event for event in events if event["event"] == "assembled"]
    assert (assembled["step"], assembled["attempt"], assembled["slices"]) == (5, 1, RANKS)


def test_a_flusher_that_nobody_uses_removes_what_it_made_a_file_of(
    run_dir: Path, image: Image, start: Start
) -> None:
    put(run_dir, image, attempt=1, step=5)
    flusher = start()
    wait_until(lambda: is_verified(run_dir, "step-000000005.pt"))
    stager = StagerClient(flusher.directory)
    stager.finish()
    assert flusher.wait() == 0
    stager.close()
    assert slices_in(run_dir) == []
    check_file(run_dir, image, "step-000000005.pt", (1, 5))


def test_slices_and_stager_make_the_same_file(run_dir: Path, image: Image, start: Start) -> None:
    put(run_dir, image, attempt=1, step=5)
    flusher = start()
    stager = StagerClient(flusher.directory)
    stager.save(image, 9)
    stager.wait("verified", step=9)
    wait_until(lambda: is_verified(run_dir, "step-000000005.pt"))
    stager.finish()
    assert flusher.wait() == 0
    stager.close()
    by_stager, by_ranks = (
        manifest_at(run_dir, f"{name}.pt") for name in ("step-000000009-a002", "step-000000005")
    )
    assert (run_dir / by_stager.file).read_bytes() == (run_dir / by_ranks.file).read_bytes()
    same = (
        "image_bytes",
        "image_crc32",
        "chunk_bytes",
        "chunk_crc32s",
        "ranks",
        "layout_digest",
        "entries",
        "tensors",
    )
    assert [getattr(by_stager, name) for name in same] == [getattr(by_ranks, name) for name in same]


@pytest.mark.parametrize("where", ["slices_read#2", "file_named", "image_named", "image_listed", "verifying"])
def check_a_flusher_that_is_killed_anywhere_is_followed_by_one_that_ends_it(
    run_dir: Path, image: Image, start: Start, where: str
) -> None:
    put(run_dir, image, attempt=1, step=5)
    first = start(fault=f"flusher@{where}=kill")
    first.wait_killed()
    assert slices_in(run_dir) == [((1, 5), 3, 3)]
    second = start()
    wait_until(lambda: is_verified(run_dir, "step-000000005.pt"))
    check_file(run_dir, image, "step-000000005.pt", (1, 5))
    stager = StagerClient(second.directory)
    try:
        stager.save(image, 7)
        stager.wait("verified", step=7)
        stager.finish()
    finally:
        stager.close()
    assert second.wait() == 0
    assert slices_in(run_dir) == []
    assert leftovers(run_dir) == []
    assert sorted(path.name for path in run_dir.glob("step-*")) == [
        "step-000000005.json",
        "step-000000005.pt",
        "step-000000007-a003.json",
        "step-000000007-a003.pt",
    ]


def test_slices_that_are_older_than_what_is_published_become_no_file(
    run_dir: Path, image: Image, start: Start
) -> None:
    flusher = start()
    stager = StagerClient(flusher.directory)
    stager.save(image, 8)
    stager.wait("verified", step=8)
    put(run_dir, image, attempt=stager.welcome["attempt"], step=7)
    stager.finish()
    assert flusher.wait() == 0
    stager.close()
    second = start()
    stager = StagerClient(second.directory)
    stager.finish()
    assert second.wait() == 0
    stager.close()
    assert not list(run_dir.glob("step-000000007*"))
    nothing = holdfast("assemble", run_dir)
    assert nothing.returncode == 0
    assert "nothing to do" in nothing.stdout


# -- the ranks -----------------------------------------------------------------------------------------------------

WRITE = """
import sys
from pathlib import Path
from holdfast.faultpoint import identify
from holdfast.store import open_store
from tests.support.images import from_torch_file
from tests.support.store_slices import write_slices
identify("rank:1")
image = from_torch_file(Path(sys.argv[2]), chunk_bytes=64 << 10, ranks=3)
store = open_store(sys.argv[1])
for step in (5, 6):
    for tier in write_slices(store, image, attempt=1, step=step):
        tier.complete(1, step)
"""


@pytest.mark.parametrize(
    ("where", "newest"),
    [("file_named#2", 0), ("slice_stored#5", 5), ("slice_sealed#5", 5), ("slice_sealed#6", 6)],
)
def check_ranks_that_are_killed_anywhere_leave_the_newest_complete_set(
    run_dir: Path, image: Image, tmp_path: Path, where: str, newest: int
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", WRITE, str(run_dir), str(tmp_path / "original-1.pt")],
        env={**os.environ, "HOLDFAST_FAULT": f"rank:1@{where}=kill", "PYTHONPATH": str(Path.cwd())},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    made = holdfast("assemble", run_dir)
    if not newest:
        assert made.returncode == 5
        assert not list(run_dir.glob("step-*"))
        return
    assert made.returncode == 0, made.stderr
    check_file(run_dir, image, f"step-{newest:09d}.pt", (1, newest))


def test_layouts_are_there_before_the_first_seal(run_dir: Path, image: Image) -> None:
    put(run_dir, image, attempt=1, step=5, ranks=[2])
    assert (run_dir / layout_name(1, image.layout.digest)).exists()
