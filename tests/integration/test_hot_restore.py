"""All MPI processes of a job are killed; the next job resumes from the stager's ring, over real MPI."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.ring.directory import runtime_directory
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from tests.integration.jobs import hot
from tests.support.cluster import Cluster, wait_until

pytestmark = [pytest.mark.mpi]
RING = "the stager's ring"
STAGER = ("--chunk-bytes", "64KiB", "--ring-bytes", "512KiB", "--keep-last", "0", "--no-verify", "--linger")


class Machine:
    """The stager's machine: its flusher outlives the jobs."""

    def __init__(self, root: Path, store: str, env: dict[str, str]) -> None:
        self.runtime, self.launches = root / "machine", 0
        self.cluster = Cluster(root, store, env, script=hot.__file__, stager=STAGER)

    def launch(self, *words: str) -> list[list[dict[str, Any]]]:
        """One job of two ranks, to its end by SIGKILL; what each rank has restored."""
        self.launches += 1
        out = self.cluster.out(self.launches)
        with self.cluster.start(2, *words, runtime=self.runtime, ulfm=False) as job:
            job.wait(200)
            assert all((out / f"done-{rank}").exists() for rank in range(2)), job.output()
        found = [out / f"restored-{rank}.json" for rank in range(2)]
        return [json.loads(path.read_text()) for path in found if path.exists()]

    @property
    def directory(self) -> Path:
        return runtime_directory(self.cluster.store, self.runtime)

    def wait_until_free(self) -> None:
        """Until the flusher has noticed the end of the stager, and nothing waits to be written."""
        with Ring.attach(self.directory) as ring:
            wait_until(
                lambda: (
                    not ring.checkpoint_ids()
                    and all(ring.state(slot) is SlotState.FREE for slot in range(ring.ring_chunks))
                ),
                60,
                "the ring is not free",
            )

    def end(self) -> None:
        pid = self.directory / "flusher.pid"
        if pid.exists():
            os.kill(int(pid.read_text()), signal.SIGTERM)
            wait_until(lambda: not self.directory.exists(), 60, "the flusher has not taken its ring away")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, str(tmp_path / "store"), {})
    try:
        yield made
    finally:
        made.end()


def _check(reports: list[list[dict[str, Any]]], number: int, step: int) -> list[dict[str, Any]]:
    found = [report[number] for report in reports]
    assert len(found) == 2
    assert [(one["step"], one["same"]) for one in found] == [(step, True)] * 2
    assert [one["own"] for one in found] == [{"rank": rank, "step": step} for rank in range(2)]
    return found


def test_a_durable_checkpoint_in_the_ring_costs_no_byte_of_the_store(machine: Machine) -> None:
    machine.launch("save", "durable", "3", "4")
    machine.wait_until_free()
    reports = machine.launch("restore", "3")
    newest = _check(reports, 0, 4)
    assert [one["store_requests"] for one in newest] == [0, 0]
    # Each rank has read all of it in the shared memory.
    assert all(one["sources"].keys() == {RING} and one["sources"][RING] > 4 * 64 << 10 for one in newest)
    assert all(one["in_store"] and not one["mended"] for one in newest)
    # Step 4 has taken room that step 3 had: what is left of it comes from the ring, the rest from the store.
    older = _check(reports, 1, 3)
    from_ring = sum(one["sources"].get(RING, 0) for one in older)
    from_store = sum(one["sources"].get(machine.cluster.store, 0) for one in older)
    assert from_ring > 0
    assert from_store > 0
    assert not older[0]["mended"], "room that was wanted is no damage"
    # A bit flips in a free slot.
    with Ring.attach(machine.directory) as ring:
        slot = next(one.slot for one in ring.remains() if (one.step, one.chunk) == (4, 1))
        ring.slot_memory(slot)[1000] ^= 1
    damaged = _check(machine.launch("restore"), 0, 4)
    assert "frame" in damaged[0]["mended"][0]
    assert RING in damaged[0]["mended"][0]
    assert sum(one["sources"].get(machine.cluster.store, 0) for one in damaged) == 64 << 10
    assert sum(one["sources"].get(RING, 0) for one in damaged) > 4 * 64 << 10
