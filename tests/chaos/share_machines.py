"""Two machines that write one file, a kill at a named moment, the next job, and checks of the result.

    machines a, b: each a flusher with its share, and a simulated stager
    step 5 is published ─► step 6 reaches the moment ─► SIGKILL ─► survivors continue ─► the next job saves step 7

A lost machine has lost its ring. The stager of a killed flusher finds another flusher, as a real stager does. In the
next job a surviving machine keeps its flusher if its share is the same. With fewer stagers, a flusher without a job
publishes its steps, as `holdfast flusher` does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.verification import verify_file
from holdfast.errors import HoldfastError
from holdfast.faultpoint import FIRED_VARIABLE, VARIABLE
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import State, manifest_name
from holdfast.image.shares import ShareNumber, Shares
from holdfast.ring.directory import runtime_directory
from holdfast.ring.journal import SlotState
from holdfast.store import open_store, part_chunks_for
from holdfast.store.base import Store
from tests.chaos.share_cells import IDLE, Sent, ShareCell
from tests.faults.flushing import FaultedFlusher, image_of, original, wait_until
from tests.support import other_host_site
from tests.support.cluster import same
from tests.support.images import Image
from tests.support.job import REPOSITORY
from tests.support.s3_place import plain_client
from tests.support.stager_client import StagerClient

__all__ = ["ShareMachines", "play_shares", "share_parameters", "store_of"]

_END_SECONDS_MAX = 60.0
_CONNECT_SECONDS = 1.0  # the flusher is ready, or is just ending
BEFORE, STEP, AFTER = 5, 6, 7
SIZES = {"directory": (400_000, 64 << 10), "S3": (19_000_000, 1 << 20)}
FENCED = 8
WAITS_SECONDS, WAITS_SECONDS_LOST = 60.0, 6.0


class Machine:
    """A flusher and its stager on a host of this name, with a memory of their own."""

    def __init__(self, scene: ShareMachines, name: str, share: ShareNumber) -> None:
        self.base, self.name, self.url, self.share = scene.place / name, name, scene.url, share
        self.base.mkdir()
        self.fired = self.base / "fired"
        self.fired.mkdir()
        self._chunk_bytes, self._waits_seconds = scene.sizes[1], scene.waits_seconds
        self.flushers: list[FaultedFlusher] = []
        self.stager: StagerClient | None = None
        self.is_lost = False

    @property
    def flusher(self) -> FaultedFlusher:
        return self.flushers[-1]

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.flusher.process.pid)

    def start(self, fault: str = "") -> None:
        """Start another flusher."""
        site = Path(other_host_site.__path__[0])
        env = {
            "PYTHONPATH": f"{site}:{REPOSITORY}",
            "TEST_HOST": self.name,
            "TEST_ALSO": "tests.support.short_waits",  # not imported here: it changes the flusher
            "TEST_OTHERS_SECONDS": str(self._waits_seconds),
            VARIABLE: fault,
            FIRED_VARIABLE: str(self.fired),
        }
        size, share = self._chunk_bytes, ("--share", str(self.share))
        self.flushers.append(
            FaultedFlusher(
                self.base,
                self.url,
                *(
                    *(share if self.share.writers > 1 else ()),
                    "--keep-last",
                    "0",
                    "--heartbeat-seconds",
                    "0.5",
                ),
                env=env,
                chunk=str(size),
                ring=str(24 * size),
            )
        )

    def attach(self, lead_attempt: int, *, attempt: int = 0) -> StagerClient:
        """Connect a stager to the flusher. `attempt`: that of a ring it still has."""
        before = self.stager
        self.stager = StagerClient(
            runtime_directory(self.url, self.base / "rt", share=self.share.index),
            seed=self.share.index,
            attempt=attempt,
            share=self.share,
            lead_attempt=lead_attempt,
            wait_seconds=_CONNECT_SECONDS,
        )
        if before is not None:
            before.close()
        return self.stager

    def join(self, lead_attempt: int) -> StagerClient:
        """A new stager finds the flusher or starts one, as a real stager does."""
        deadline = time.monotonic() + _END_SECONDS_MAX
        while True:
            if not self.flushers or self.flusher.process.poll() is not None:
                self.start()
            with contextlib.suppress(AssertionError, HoldfastError, OSError):
                return self.attach(lead_attempt)
            assert time.monotonic() < deadline, f"no flusher takes a stager:\n{self.log()}"
            time.sleep(0.1)

    def wait_for(self, point: str) -> None:
        """Wait until the flusher is stopped at the point."""
        marker = self.fired / f"flusher@{point}"
        wait_until(
            lambda: marker.exists() and self.process.status() == psutil.STATUS_STOPPED,
            lambda: f"{self.name}: {point} was never reached:\n{self.log()}",
        )

    def kill_stager(self) -> None:
        assert self.stager is not None
        self.stager.close()
        self.stager = None

    def lose(self) -> None:
        """Kill flusher and stager, and remove their memory."""
        if self.flusher.process.poll() is None:
            self.flusher.kill()
        self.kill_stager()
        shutil.rmtree(self.base / "rt")
        self.is_lost = True

    def end(self) -> int:
        """Wait until the flusher ends by itself; return its exit code."""
        wait_until(
            lambda: self.flusher.process.poll() is not None,
            lambda: f"{self.name}: the flusher does not end:\n{self.log()}",
            _END_SECONDS_MAX,
        )
        return self.flusher.process.wait()

    def log(self) -> str:
        path = self.base / "flusher.log"
        return path.read_text()[-6000:] if path.exists() else ""

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()
        for flusher in self.flushers:
            if flusher.process.poll() is None:
                flusher.kill()
            assert flusher.process.stdout is not None
            flusher.process.stdout.close()


class ShareMachines:
    """The machines and the store of one cell. A context manager: kills all processes at the end."""

    def __init__(self, place: Path, url: str, cell: ShareCell) -> None:
        self.place, self.url, self.sizes = place, url, SIZES[cell.store]
        # A flusher waits without end only for a share that is gone for good.
        self.waits_seconds = WAITS_SECONDS if cell.survives else WAITS_SECONDS_LOST
        self.images = {step: self._image(step) for step in (BEFORE, STEP, AFTER)}
        layout = self.images[STEP].layout
        part_chunks = part_chunks_for(url, layout.image_bytes, layout.chunk_bytes)
        self.split = {writers: Shares.of(layout, writers, part_chunks) for writers in (1, 2)}
        assert self.split[2].count == 2
        self.machines: list[Machine] = []
        self.attempt = 0

    def _image(self, step: int) -> Image:
        return image_of(self.place, step, nbytes=self.sizes[0], chunk_bytes=self.sizes[1])

    def machine(self, share: ShareNumber) -> Machine:
        """Add a machine."""
        name = "abcdefgh"[len(self.machines)]
        self.machines.append(Machine(self, name, share))
        return self.machines[-1]

    def begin(self, stage_points: tuple[str, str]) -> None:
        """Start a job with two stagers."""
        for index, point in enumerate(stage_points):
            machine = self.machine(ShareNumber(index, 2))
            machine.start(f"flusher@{point}=stop" if point else "")
            stager = machine.attach(self.attempt)
            self.attempt = self.attempt or stager.attempt

    def numbered(self, share: int, point: str) -> str:
        """The point, with its number in the second checkpoint."""
        if not point:
            return ""
        times = len(self.split[2].parts_of(share)) if point.startswith("part_") else 1
        return f"{point}#{times + 1}"

    def chunks(self, share: int, sent: Sent) -> list[int]:
        """The chunks of a share that have been received by then. Half: all but the last."""
        found = list(self.split[2].chunks_of(share))
        return {Sent.BEGUN: [], Sent.HALF: found[:-1], Sent.STAGED: found}[sent]

    def send(self, machine: Machine, step: int, sent: Sent, *, before: Sent | None = None) -> None:
        """Let a stager receive its share up to `sent`."""
        share, image, stager = machine.share.index, self.images[step], machine.stager
        assert stager is not None
        if before is None:
            stager.begin(image, step)
        had = [] if before is None else self.chunks(share, before)
        stager.send(image, step, [chunk for chunk in self.chunks(share, sent) if chunk not in had])
        if sent is Sent.STAGED and before is not Sent.STAGED:
            stager.staged(image, step)

    def again(self, machine: Machine, sent: Sent) -> None:
        """A stager whose flusher was killed continues with the next one."""
        machine.start()
        assert machine.stager is not None
        attempt = machine.stager.attempt
        stager = machine.attach(self.attempt if machine.share.index else 0, attempt=attempt)
        assert stager.welcome["resumed"] is True
        layout = self.images[STEP].layout
        stager.channel.send("begin", attempt=attempt, step=STEP, layout_digest=layout.digest)
        for slot in range(stager.ring.ring_chunks):
            record = stager.ring.record(slot)
            if record.state is SlotState.FULL and record.step == STEP:
                stager.channel.send("chunk", slot=slot)
        if sent is Sent.STAGED:
            stager.channel.send("staged", attempt=attempt, step=STEP)

    def objects(self) -> dict[str, bytes]:
        """The published files, byte by byte."""
        store = open_store(self.url)
        return {info.name: store.read(info.name) for info in store.list() if info.name.startswith("step-")}

    def logs(self) -> str:
        return "\n".join(f"--- {machine.name}:\n{machine.log()}" for machine in self.machines)

    def close(self) -> None:
        for machine in self.machines:
            machine.close()

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self, steps: set[int]) -> None:
        """Check that exactly these steps are listed, each as torch wrote it, and that the store has nothing else."""
        store = open_store(self.url)
        items = Catalog(store).list()
        listed = {item.step for item in items}
        assert listed == steps, f"listed are {sorted(listed)}, expected {sorted(steps)}:\n{self.logs()}"
        names: set[str] = set()
        for item in items:
            assert item.manifest is not None, item.fault
            assert not item.fault, item.fault
            assert verify_file(store, item.manifest).ok
            file = item.manifest.file
            data = store.read(file)
            assert data == self.images[item.step].final, f"{file} is not what one stager writes"
            names |= {file, manifest_name(file)}
        newest = Catalog(store).get()
        assert (newest.step, newest.state) == (max(steps), State.VERIFIED)
        path = self.place / "newest.pt"
        path.write_bytes(store.read(newest.file))
        assert same(torch.load(path, weights_only=True), original(newest.step, nbytes=self.sizes[0]))
        there = self._names(store)
        if any(name.endswith("void") for name in there):
            # The file stays for readers, until another writer of the run begins.
            _clear_away(self)
            there = self._names(store)
        assert there == names, f"{sorted(there ^ names)}:\n{self.logs()}"
        assert not self.open_uploads()
        for machine in self.machines:
            left = [] if machine.is_lost else list((machine.base / "rt").glob("*/ring"))
            assert not left, f"{machine.name}: {left}:\n{machine.log()}"
            assert "Traceback" not in machine.log()

    @staticmethod
    def _names(store: Store) -> set[str]:
        return {info.name for info in store.list() if not info.name.startswith(".holdfast/writer-")}

    def open_uploads(self) -> list[str]:
        if not self.url.startswith("s3://"):
            return []
        client = plain_client()
        try:
            bucket = self.url.removeprefix("s3://").partition("/")[0]
            found = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        finally:
            client.close()
        return [str(upload["Key"]) for upload in found]

    def said_of_loss(self) -> list[str]:
        """Lines of logs and event logs about the step that is given up."""
        key = str(CheckpointId(1, STEP))
        said = [line for line in self.logs().splitlines() if key in line]
        for machine in self.machines:
            if machine.flushers:
                said += [str(event["message"]) for event in machine.flusher.happened("flush_failed")]
        return said


@contextlib.contextmanager
def _closing(machines: ShareMachines) -> Iterator[ShareMachines]:
    try:
        yield machines
    finally:
        machines.close()


def share_parameters(cells: Iterable[ShareCell]) -> list[object]:
    """Cells for pytest.mark.parametrize."""
    return [
        pytest.param(cell, id=cell.name, marks=[pytest.mark.s3] if cell.store == "S3" else [])
        for cell in cells
    ]


def store_of(cell: ShareCell, request: pytest.FixtureRequest, directory: Path) -> str:
    """A fresh run's URL."""
    if cell.store == "S3":
        return str(request.getfixturevalue("swift_s3").url())
    return str(directory / "store" / "run")


def play_shares(cell: ShareCell, place: Path, url: str) -> None:
    """Play one cell at a fresh run."""
    with _closing(ShareMachines(place, url, cell)) as scene:
        _come_to_the_stage(scene, cell)
        if cell.frozen:
            _play_frozen(scene, cell)
            return
        _kill(scene, cell)
        _go_on(scene, cell)
        for machine in _next_job(scene, cell):
            assert machine.end() == 0, machine.log()
        for machine in scene.machines:
            if not machine.is_lost:
                assert machine.end() == 0, machine.log()
        scene.check({BEFORE, AFTER} | ({STEP} if cell.survives else set()))
        _check_said(scene, cell)


def _come_to_the_stage(scene: ShareMachines, cell: ShareCell) -> None:
    stands = cell.stage.stands
    points = [scene.numbered(share, "" if point == IDLE else point) for share, point in enumerate(stands)]
    scene.begin((points[0], points[1]))
    for machine in scene.machines:
        scene.send(machine, BEFORE, Sent.STAGED)
    for machine in scene.machines:
        assert machine.stager is not None
        machine.stager.wait("durable", step=BEFORE)
    lead = scene.machines[0].stager
    assert lead is not None
    lead.wait("verified", step=BEFORE)
    for machine, point in zip(scene.machines, stands, strict=True):
        if point == IDLE:
            machine.flusher.freeze()
    for machine, sent in zip(scene.machines, cell.stage.sent, strict=True):
        scene.send(machine, STEP, sent)
    for machine, point in zip(scene.machines, points, strict=True):
        if point:
            machine.wait_for(point)


def _kill(scene: ShareMachines, cell: ShareCell) -> None:
    victims = cell.victims
    for share, machine in enumerate(scene.machines):
        if share in victims.nodes:
            machine.lose()
        if share in victims.flushers:
            machine.flusher.kill()
        if share in victims.stagers:
            machine.kill_stager()
    for machine in scene.machines:
        if machine.flusher.process.poll() is None:
            os.kill(machine.flusher.process.pid, signal.SIGCONT)


def _go_on(scene: ShareMachines, cell: ShareCell) -> None:
    """Let the survivors act as real stagers and ranks would."""
    sent = cell.stage.sent
    died = bool(cell.victims.stagers or cell.victims.nodes)
    living = [machine for machine in scene.machines if machine.stager is not None]
    for machine in living:
        share = machine.share.index
        if machine.flusher.process.poll() is not None:
            scene.again(machine, sent[share])
        if died and not cell.stage.is_staged:
            assert machine.stager is not None
            machine.stager.abort(STEP, "a stager is lost")
        elif not died:
            scene.send(machine, STEP, Sent.STAGED, before=sent[share])
    for machine in living:
        stager = machine.stager
        assert stager is not None
        if not died:
            stager.wait("durable", step=STEP)
        stager.channel.send("finish")
        machine.kill_stager()


def _next_job(scene: ShareMachines, cell: ShareCell) -> list[Machine]:
    """Start the next job, with other stagers or the same machines; it saves one more step."""
    joined: list[Machine] = []
    lead_attempt = 0
    left = [machine for machine in scene.machines if not machine.is_lost]
    over = [one for one in left if one.share != ShareNumber(one.share.index, cell.then)]
    for machine in over:  # with other stagers each flusher publishes its steps, and ends
        if machine.flusher.process.poll() not in (None, 0) and not (cell.at_once and machine is over[0]):
            machine.start()
    for index in range(cell.then):
        share, before = ShareNumber(index, cell.then), scene.machines[index]
        machine = scene.machine(share) if before.is_lost else before
        if machine in over:
            if not cell.at_once:
                machine.end()
            machine.share = share
        stager = machine.join(lead_attempt)
        lead_attempt = lead_attempt or stager.attempt
        joined.append(machine)
    assert lead_attempt > 1
    image = scene.images[AFTER]
    for machine in joined:
        assert machine.stager is not None
        machine.stager.save(image, AFTER, chunks=scene.split[cell.then].chunks_of(machine.share.index))
    for machine in joined:
        assert machine.stager is not None
        machine.stager.wait("durable", step=AFTER)
    assert joined[0].stager is not None
    joined[0].stager.wait("verified", step=AFTER)
    for machine in joined:
        assert machine.stager is not None
        machine.stager.channel.send("finish")
    for machine in joined:
        assert machine.stager is not None
        machine.stager.wait("drained")
        machine.kill_stager()
    return joined


def _play_frozen(scene: ShareMachines, cell: ShareCell) -> None:
    """Freeze the victims' machines until the next job is over."""
    frozen = [scene.machines[share] for share in cell.victims.nodes]
    for machine in scene.machines:
        machine.is_lost = machine in frozen
        if machine.is_lost:
            machine.flusher.freeze()
        else:
            os.kill(machine.flusher.process.pid, signal.SIGCONT)
    for machine in scene.machines:
        if machine in frozen:
            continue
        assert machine.stager is not None
        if not cell.stage.is_staged:
            machine.stager.abort(STEP, "a stager is lost")
        machine.stager.channel.send("finish")
        machine.kill_stager()
    _next_job(scene, cell)
    for machine in scene.machines:
        if machine not in frozen:
            assert machine.end() == 0, machine.log()
    steps = {BEFORE, AFTER} | ({STEP} if cell.survives else set())
    before = scene.objects()
    of_first_job = {manifest_name(f"step-{step:09d}.pt") for step in steps - {AFTER}}
    assert of_first_job <= before.keys(), scene.logs()
    for machine in frozen:
        os.kill(machine.flusher.process.pid, signal.SIGCONT)
    for machine in frozen:
        machine.kill_stager()
        assert machine.end() == (FENCED if machine.share.is_lead else 0), machine.log()
        machine.is_lost = False
    assert scene.objects() == before, "what was published is no longer what it was"
    scene.check(steps)
    _check_said(scene, cell)


def _clear_away(scene: ShareMachines) -> None:
    """Check that another flusher removes the late ones' leftovers, and nothing else."""
    last = scene.machine(ShareNumber(0, 1))
    last.join(0).finish()
    last.stager = None
    assert last.end() == 0, last.log()


def _check_said(scene: ShareMachines, cell: ShareCell) -> None:
    """Check that the logs name a step that was whole on all machines and is lost."""
    nobody_knows = IDLE in cell.stage.stands and len(cell.victims.nodes) == len(cell.stage.stands)
    if cell.stage.is_staged and not cell.survives and not nobody_knows:
        lines = scene.said_of_loss()
        names = [f"share {share + 1}" for share in cell.unsealed] + ["first stager"] * (0 in cell.unsealed)
        assert any(name in line for name in names for line in lines), "\n".join(lines)
