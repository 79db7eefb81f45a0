"""Three real flushers write one checkpoint, on a directory and on a real S3 server; the stagers are played by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from holdfast.image.shares import ShareNumber, Shares
from holdfast.store import open_store, part_chunks_for
from tests.support.flushers import watched
from tests.support.images import Image, from_torch_file
from tests.support.s3_place import S3Place
from tests.support.stager_client import FlusherProcess, StagerClient

WRITERS = 3


class Machines:
    """A flusher and a stager for each share, as if each pair were on a machine of its own."""

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
        """All objects of the run but the claims."""
        return [info.name for info in open_store(self.flushers[0].url).list() if "/writer-" not in info.name]


@pytest.fixture(params=["directory", pytest.param("swift", marks=pytest.mark.s3)])
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machines]:
    on_s3 = request.param != "directory"
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
