"""Three real flushers write one checkpoint, on a directory and on a real S3 server; the stagers are simulated."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from holdfast.config import StagerConfig
from holdfast.image.shares import ShareNumber, Shares
from holdfast.store import open_store, part_chunks_for
from stager import flusher_process
from stager.flusher_process import attach
from tests.support.cluster import wait_until
from tests.support.flushers import watched
from tests.support.images import Image, from_torch_file
from tests.support.s3_place import S3Place
from tests.support.stager_client import FlusherProcess, StagerClient

WRITERS = 3


class Machines:
    """A flusher and a simulated stager for each share, as if each pair had its own machine."""

    def __init__(self, place: Path, url: str, image: Image, start: Callable[..., FlusherProcess]) -> None:
        self.place, self.url, self.image, self._start = place, url, image, start
        layout = image.layout
        part_chunks = part_chunks_for(url or str(place), layout.image_bytes, layout.chunk_bytes)
        self.shares = Shares.of(layout, WRITERS, part_chunks)
        self.flushers: list[FlusherProcess] = []
        self.stagers: list[StagerClient] = []

    def begin(self, *, faults: dict[int, str] | None = None) -> None:
        for index in range(WRITERS):
            self.flushers.append(self.flusher(index, (faults or {}).get(index, "")))
            self.stagers.append(self.stager(index))

    def flusher(self, index: int, fault: str = "") -> FlusherProcess:
        chunk_bytes = self.image.layout.chunk_bytes
        return self._start(
            *("--share", f"{index + 1}/{WRITERS}", "--keep-last", "0"),
            chunk=str(chunk_bytes),
            ring=str(chunk_bytes * 24),
            store=self.url,
            fault=fault,
        )

    def stager(self, index: int, attempt: int = 0) -> StagerClient:
        lead_attempt = self.stagers[0].attempt if index else 0
        number = ShareNumber(index, WRITERS)
        directory = self.flushers[index].directory
        return StagerClient(directory, seed=index, attempt=attempt, share=number, lead_attempt=lead_attempt)

    def replace(self, index: int) -> None:
        """Replace the dead flusher of a share, as its stager would."""
        self.flushers[index].wait_killed()
        attempt = self.stagers[index].attempt
        self.stagers[index].close()
        self.flushers[index] = self.flusher(index)
        self.stagers[index] = stager = self.stager(index, attempt)
        # As a real one says again what it knows: the step may have become durable before it came.
        digest = self.image.layout.digest
        stager.channel.send("begin", attempt=attempt, step=5, layout_digest=digest)

    def save(self, step: int, *indexes: int) -> None:
        for index in indexes or range(WRITERS):
            self.stagers[index].save(self.image, step, chunks=self.shares.chunks_of(index))

    def wait(self, kind: str, step: int) -> list[dict[str, object]]:
        return [stager.wait(kind, step=step).fields for stager in self.stagers]

    def finish(self) -> list[int]:
        for stager in self.stagers:
            stager.channel.send("finish")
        for stager in self.stagers:
            stager.wait("drained")
            stager.close()
        return [flusher.wait() for flusher in self.flushers]

    def names(self) -> list[str]:
        """Return the names of all objects of the run except claims."""
        return [info.name for info in open_store(self.flushers[0].url).list() if "/writer-" not in info.name]


@pytest.fixture
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machines]:
    on_s3 = getattr(request, "param", "directory") != "directory"
    url = cast(S3Place, request.getfixturevalue("swift_s3")).url() if on_s3 else ""
    torch.manual_seed(1)
    path = tmp_path / "original.pt"
    torch.save({f"layer.{n}": torch.randn(12_000 if on_s3 else 1_000, 101) for n in range(4)}, path)
    image = from_torch_file(path, chunk_bytes=1 << 20 if on_s3 else 1 << 16, ranks=3)
    with watched(tmp_path, lambda *options, **more: FlusherProcess(tmp_path, *options, **more)) as start:
        made = Machines(tmp_path, url, image, start)
        yield made
        for stager in made.stagers:
            stager.close()


@pytest.mark.parametrize(
    "machines", ["directory", pytest.param("swift", marks=pytest.mark.s3)], indirect=True
)
def test_three_flushers_write_the_file_that_one_would_have_written(machines: Machines) -> None:
    assert machines.shares.count == WRITERS
    machines.begin()
    machines.save(5)
    assert [said["file"] for said in machines.wait("durable", 5)] == ["step-000000005.pt"] * WRITERS
    machines.stagers[0].wait("verified", step=5)
    machines.save(6, 2, 1, 0)
    machines.wait("durable", 6)
    machines.stagers[0].wait("verified", step=6)
    assert machines.finish() == [0] * WRITERS
    store = open_store(machines.flushers[0].url)
    assert machines.names() == [f"step-00000000{n}.{kind}" for n in (5, 6) for kind in ("json", "pt")]
    assert store.read("step-000000005.pt") == store.read("step-000000006.pt") == machines.image.final
    path = machines.place / "read.pt"
    path.write_bytes(store.read("step-000000006.pt"))
    code = "import sys, torch; assert len(torch.load(sys.argv[1], weights_only=True)) == 4"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd="/")


@pytest.mark.parametrize(
    ("index", "point"),
    [
        (1, "part_recorded"),
        (2, "crcs_put"),
        (1, "share_sealed"),
        (0, "shares_begun"),
        (0, "all_sealed"),
        (0, "file_published"),
    ],
)
def test_a_flusher_that_dies_is_replaced_and_the_step_is_durable(
    machines: Machines, index: int, point: str
) -> None:
    # Share 3 has no later one that would wait for its CRCs: it puts none.
    index = 0 if point == "crcs_put" else index
    machines.begin(faults={index: f"flusher@{point}=kill"})
    for one in range(WRITERS):
        if one != index:
            machines.save(5, one)
    stager = machines.stagers[index]
    stager.begin(machines.image, 5)
    stager.send(machines.image, 5, machines.shares.chunks_of(index))
    stager.staged(machines.image, 5)
    machines.replace(index)
    machines.wait("durable", 5)
    assert machines.finish() == [0] * WRITERS
    assert machines.names() == ["step-000000005.json", "step-000000005.pt"]
    assert (machines.flushers[0].store / "step-000000005.pt").read_bytes() == machines.image.final


def test_the_next_flusher_that_leads_publishes_what_all_had_sealed(
    machines: Machines, tmp_path: Path
) -> None:
    """The machine of the first stager is gone, with its ring; the others have heard nothing of the end."""
    machines.begin(faults={0: "flusher@all_sealed=kill"})
    machines.save(5)
    machines.flushers[0].wait_killed()
    machines.stagers[0].close()
    shutil.rmtree(machines.flushers[0].directory)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    machines.flushers[0] = machines.flusher(0)
    for stager in machines.stagers[1:]:
        assert stager.wait("durable", step=5).fields["file"] == "step-000000005.pt"
    machines.stagers[0] = machines.stager(0)
    assert machines.stagers[0].attempt == 2
    assert machines.finish() == [0] * WRITERS
    assert machines.names() == ["step-000000005.json", "step-000000005.pt"]
    assert (machines.flushers[0].store / "step-000000005.pt").read_bytes() == machines.image.final
    assert machines.flushers[0].manifest(5)["record"]["stager"].keys() == {"staged_at_unix"}


def test_a_relaunch_with_one_stager_publishes_what_three_had_staged(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three were on this machine, and all are killed before a share is sealed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    machines.begin(faults=dict.fromkeys(range(WRITERS), "flusher@part_recorded=kill"))
    for index in range(WRITERS):
        stager = machines.stagers[index]
        stager.begin(machines.image, 5)
        stager.send(machines.image, 5, machines.shares.chunks_of(index))
        stager.staged(machines.image, 5)
    for index in range(WRITERS):
        machines.flushers[index].wait_killed()
        machines.stagers[index].close()
    chunk_bytes = machines.image.layout.chunk_bytes
    config = StagerConfig(
        store=machines.flushers[0].url,
        runtime_dir=tmp_path / "rt",
        chunk_bytes=chunk_bytes,
        ring_bytes=24 * chunk_bytes,
        keep_last=0,
    )
    found = attach(config)
    assert found.attempt == 2
    wait_until(lambda: bool(machines.flushers[0].manifest(5)), 60.0, "step 5 is not published")
    found.channel.send("finish")
    found.close()
    assert len(flusher_process._started) == WRITERS
    while flusher_process._started:
        assert flusher_process._started.popitem()[0].wait(60) == 0
    assert machines.names() == ["step-000000005.json", "step-000000005.pt"]
    assert (machines.flushers[0].store / "step-000000005.pt").read_bytes() == machines.image.final
    assert list((tmp_path / "rt").glob("*/journal")) == []


def test_a_share_that_is_aborted_fails_the_step_everywhere_by_name(machines: Machines) -> None:
    machines.begin()
    machines.save(5, 0, 2)
    machines.stagers[1].begin(machines.image, 5)
    machines.stagers[1].abort(5, "rank 4 is gone")
    said = machines.wait("failed", 5)
    assert "rank 4 is gone" in str(said[1]["message"])
    for one in (said[0], said[2]):
        assert "share 2, on" in str(one["message"])
        assert "rank 4 is gone" in str(one["message"])
    machines.save(6)
    machines.wait("durable", 6)
    assert machines.finish() == [0] * WRITERS
    assert machines.names() == ["step-000000006.json", "step-000000006.pt"]


def test_a_stager_with_another_share_is_refused_by_name(machines: Machines) -> None:
    machines.flushers.append(machines.flusher(1))
    directory = machines.flushers[0].directory
    for said, message in (
        (
            {"share": ShareNumber(2, 3), "lead_attempt": 1},
            r"writes share 2/3, and the stager .* has share 3/3; the flusher ends",
        ),
        ({"share": ShareNumber(1, 3)}, "names attempt 0 of the stager that leads"),
    ):
        with pytest.raises(AssertionError, match=message):
            StagerClient(directory, **said)
