"""One simulated machine room: a store, a node with a ring, jobs of ranks and a stager, flushers, and their faults.

    launcher ─► job 0, job 1, …    each: ranks (real Link, a script of our own) + stager (real Service)
                      │ stager starts the flusher, as in production
                      ▼
               flusher (real `run_flusher`: claim, adoption, engine, pipeline, publish, maintenance)

    faults: kill any process at an event or at a named point of its work; freeze it for a while; remove the node;
            flip a bit on the wire or in the ring; tear a copy; the store fails, loses answers, is slow or full;
            another writer

All choices come from the seed. `tests/simulation/checks.py` checks the whole world after each event.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flusher.lifetime import run_flusher
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease
from holdfast.checkpoints.publish import choose_name, writer_id
from holdfast.config import FlusherConfig, StagerConfig, TrainerConfig
from holdfast.errors import HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import manifest_name
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import area_bytes, frames_of
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.store.base import SMALL_BYTES_MAX
from holdfast.store.retrying import RetryBudget, Retrying
from holdfast.telemetry.causes import DeclineCause
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import VERSION, Kind, decode, encode, to_json
from holdfast.wire.welcome import Welcome
from stager.flusher_process import attach
from stager.service import StagerService
from tests.simulation.checks import RING_CHUNKS, Checks
from tests.simulation.copying import Area, FrameBatch, begin_copy, start_copier
from tests.simulation.hot import reread, restored_from_ring
from tests.simulation.images import CHUNK_BYTES, image
from tests.simulation.proving import ProofChecks, ProofTeller
from tests.simulation.runtime import SIM
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.store import URL, OpenUpload, StoreClient, StoreState, pristine
from tests.simulation.transport import Job, notice_death
from tests.support.checkpoints import manifest_of, small_image
from tests.support.images import Image
from trainer_side.link.greeting import GreetedStager
from trainer_side.link.inbox import StagerInbox
from trainer_side.link.link import Link
from trainer_side.link.rejoining import Reconnect
from trainer_side.link.stager_message import StagerMessage
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.pace.schedule import Schedule
from trainer_side.transfer import TransferState

__all__ = ["Broken", "Plan", "World"]

_SECONDS_MAX = 40_000.0
_EVENTS_MAX = 60_000
_VARIANTS = 12
_MESHES = 12
_WINNERS = small_image(3)
POINTS = {
    "rank": ["frame_sent", "slice_sent"],
    "stager": ["chunk_received", "chunk_full", "sealed", "staged"],
    "flusher": [
        "staged_heard",
        "part_begun",
        "part_written",
        "part_recorded",
        "parts_done",
        "file_published",
        "manifest_written",
        "verifying",
        "manifest_deleted",
        "recovering",
    ],
}

_DOUBT_POINTS = (
    ("stager", "doubt_heard"),
    ("stager", "doubt_written"),
    ("flusher", "doubt_marked"),
    ("flusher", "manifest_written"),
)
_PROOF_POINTS = (
    ("stager", "proof_written"),
    ("flusher", "proof_heard"),
    ("flusher", "proof_heard"),
    ("flusher", "manifest_deleted"),
    ("flusher", "manifest_written"),
)
_GROWTH_POINTS = (
    ("flusher", "ring_taken"),
    ("flusher", "ring_added"),
    ("flusher", "ring_added"),
    ("stager", "growth_heard"),
    ("flusher", "part_written"),
    ("flusher", "parts_done"),
    ("flusher", "staged_heard"),
)


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Fault:
    """One fault of the world: at an event, or when a kind of process reaches a point."""

    what: str
    at_event: int = 0
    kind: str = ""
    point: str = ""
    number: int = 1
    done: bool = False

    def __str__(self) -> str:
        where = f"at event {self.at_event}" if self.at_event else f"at {self.point}#{self.number}"
        return f"{self.what} {self.kind} {where}".replace("  ", " ")


@dataclass
class Plan:
    """The choices of a seed, made before anything runs."""

    ranks: int
    shape: int
    part_chunks: int
    store_kind: str
    attempts: int
    verify: bool
    keep_last: int
    linger: bool
    ulfm: bool
    jobs: int
    steps: int
    fail_share: float
    slow_seconds: float
    slowest_message_seconds: float
    full: str  # "", "window" or "ever"
    areas: int  # of each rank: how many checkpoints it sends at once
    doubt_share: float = 0.0  # of the steps after which a rank doubts a step that it has offered
    torn_share: float = 0.0  # of the copies that ranks make; above 0 the real copy thread makes them
    mesh: int = 0  # how tensors are split among the ranks; 0: every rank has all of them
    growth_chunks: int = -1  # memory for further slots, beyond the ring's; -1: the ring's size is fixed
    pause_seconds: float = 0.0  # at most, between two steps: longer steps extend an outage
    reads_slowly: bool = (
        False  # ranks that read the ring themselves: others act between their look and their copy
    )
    proves: bool = False  # ranks send digests of the steps after their checkpoints
    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def of(cls, scheduler: Scheduler) -> Plan:
        chance = scheduler.chance
        plan = cls(
            ranks=chance.choice([2, 2, 3]),
            shape=chance.choice([0, 0, 1, 1, 2, 3, 4, 5]),
            part_chunks=chance.choice([1, 1, 2, 3]),
            store_kind=chance.choice(["parts", "parts", "file", "file", "opaque"]),
            attempts=chance.choice([1, 3, 8]),
            verify=chance.random() < 0.3,
            keep_last=chance.choice([0, 0, 1, 2]),
            linger=chance.random() < 0.2,
            ulfm=chance.random() < 0.5,
            jobs=chance.choice([1, 1, 2]),
            steps=chance.choice([1, 2, 2, 3]),
            fail_share=chance.choice([0.0, 0.0, 0.05, 0.25]),
            slow_seconds=chance.choice([0.0, 0.0, 0.0, 1.0, 20.0]),
            slowest_message_seconds=chance.choice([0.05, 0.5, 5.0]),
            full=chance.choice(["", "", "", "", "", "window", "window", "ever"]),
            areas=chance.choice([1, 1, 1, 1, 1, 2, 3]),
        )
        if plan.areas > 1:
            plan.steps += plan.areas
        for _ in range(chance.choice([0, 1, 1, 1, 2, 2, 3])):
            plan.faults.append(plan._fault(chance))
        if plan.full:
            plan.faults.append(Fault("full", at_event=int(2 ** chance.uniform(4, 10))))
        return plan

    def may_freeze(self, seed: int) -> None:
        """In some worlds a flusher freezes at an operation of the store, and meanwhile another host takes the run over.

        This draws from its own dice: every other choice of a seed stays the same.
        """
        chance = random.Random(f"freeze {seed}")
        if chance.random() < 0.12:
            point = chance.choice(["any", "visible", "visible"])
            number = (
                int(2 ** chance.uniform(0, 7)) if point == "any" else chance.choice([1, 1, 2, 2, 3, 4, 5, 7])
            )
            self.faults.append(Fault("freeze", kind="flusher", point=point, number=number))

    def may_tear(self, seed: int) -> None:
        """In some worlds ranks find their copies torn. Uses dice of its own, as `may_freeze` does."""
        chance = random.Random(f"tear {seed}")
        if chance.random() < 0.12:
            self.torn_share = chance.choice([0.1, 0.3, 0.6])

    def may_doubt(self, seed: int) -> None:
        """In some worlds ranks doubt steps that they have offered. Uses dice of its own, as `may_freeze` does."""
        chance = random.Random(f"doubt {seed}")
        if chance.random() < 0.15:
            self.doubt_share = chance.choice([0.1, 0.4])
            if chance.random() < 0.7:
                kind, point = chance.choice(_DOUBT_POINTS)
                self.faults.append(Fault("kill", kind=kind, point=point, number=chance.choice([1, 1, 2])))

    def may_split(self, seed: int) -> None:
        """In some worlds tensors are split among the ranks. Uses dice of its own, as `may_freeze` does."""
        chance = random.Random(f"split {seed}")
        if chance.random() < 0.3:
            self.mesh = chance.randrange(1, _MESHES)
            self.ranks = chance.choice([self.ranks, self.ranks, 4])

    def may_grow(self, seed: int) -> None:
        """In some worlds the ring grows when a checkpoint comes. Uses dice of its own, as `may_freeze` does."""
        chance = random.Random(f"grow {seed}")
        if chance.random() >= 0.25:
            return
        self.growth_chunks = chance.choice([64, 64, 64, 0, 0, 1])
        number = chance.choice([1, 1, 2, 3])
        match chance.choice(["", "kept", "kept", "one step"]):
            case "kept":  # no process can continue the upload, and only a larger ring holds the image
                self.store_kind, self.shape = "opaque", 5
            case "one step":  # a flusher dies before it reports the growth, and the next one adds no slots
                self.shape, number = 0, 1
        if chance.random() < 0.5:
            self.faults, self.full, self.fail_share, self.slow_seconds = [], "", 0.0, 0.0
        if chance.random() < 0.6:
            what, (kind, point) = chance.choice(["kill", "kill", "stop"]), chance.choice(_GROWTH_POINTS)
            self.faults.append(Fault(what, kind=kind, point=point, number=number))

    def may_stand(self, seed: int) -> None:
        """In some worlds the store accepts nothing for many steps. Uses dice of its own, as `may_freeze` does."""
        chance = random.Random(f"stand {seed}")
        if chance.random() >= 0.15:
            return
        self.steps, self.pause_seconds = chance.randint(4, 7), chance.choice([6.0, 20.0])
        self.shape, self.growth_chunks, self.slow_seconds, self.doubt_share = (
            chance.choice([0, 0, 1]),
            -1,
            0.0,
            0.0,
        )
        self.faults = [] if chance.random() < 0.5 else self.faults
        self.full = chance.choice(["window", "window", "ever"])
        self.faults.append(Fault("full", at_event=int(2 ** chance.uniform(5, 10))))
        if chance.random() < 0.5:
            self.faults.append(
                Fault("kill", kind="flusher", point="superseded", number=chance.choice([1, 1, 2]))
            )
        elif chance.random() < 0.5:
            self.faults.append(Fault("job", at_event=int(2 ** chance.uniform(8, 11))))

    def may_read_slowly(self, seed: int) -> None:
        """In some worlds much happens while a rank reads the ring. Uses dice of its own, as `may_freeze` does."""
        chance = random.Random(f"read {seed}")
        if chance.random() < 0.2:
            self.reads_slowly = True
            self.jobs = 2  # the first one has nothing to read
            if chance.random() < 0.3:
                what, number = chance.choice(["kill", "stop"]), int(2 ** chance.uniform(0, 5))
                self.faults.append(Fault(what, kind="rank", point="ring_seen", number=number))

    def may_prove(self, seed: int) -> None:
        """In some worlds ranks send digests for proofs. Uses dice of its own, as `may_freeze` does."""
        chance = random.Random(f"prove {seed}")
        if chance.random() < 0.2:
            self.proves = True
            if chance.random() < 0.5:
                kind, point = chance.choice(_PROOF_POINTS)
                self.faults.append(Fault("kill", kind=kind, point=point, number=chance.choice([1, 1, 2])))

    @property
    def outgrows_ring(self) -> bool:
        """Whether the image is larger than the ring can become."""
        return self.image(0).layout.chunks > RING_CHUNKS + max(0, self.growth_chunks)

    def image(self, variant: int) -> Image:
        """The image that this world saves."""
        return image(self.shape, self.ranks, self.mesh, variant)

    @staticmethod
    def _fault(chance: Any) -> Fault:
        what = chance.choices(
            ["kill", "stop", "term", "vanish", "node", "wire", "rot", "intruder", "job"],
            [50, 8, 3, 4, 3, 4, 6, 2, 6],
        )[0]
        at = int(2 ** chance.uniform(4, 10.5))
        kind = chance.choices(["flusher", "stager", "rank"], [5, 2, 2])[0]
        if what == "kill" and chance.random() < 0.6:
            return Fault(
                what, kind=kind, point=chance.choice(POINTS[kind]), number=chance.choice([1, 1, 2, 3])
            )
        return Fault(what, at_event=at, kind=kind)


class _Source:
    """A rank's staging buffer: reused for each checkpoint, as soon as the link has released it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.data = bytearray()
        self.frames: dict[int, tuple[int, int]] = {}
        self.step = -1
        self.ready_at: Callable[[], int] = lambda: len(self.data)
        self.copy: Area | None = None  # made by the copy thread

    def fill(self, made: Image, rank: int, step: int) -> None:
        self.step = step
        self.data[:] = bytes(area_bytes(made.layout, rank))
        self.copy = None
        self.frames, self.ends = {}, {}
        for frame in frames_of(made.layout, rank):
            end = frame.offset + frame.nbytes
            self.data[frame.offset : end] = made.frame(frame.chunk, rank)
            self.frames[frame.offset], self.ends[frame.offset] = (step, frame.chunk), end

    def view(self, offset: int, nbytes: int) -> memoryview:
        self._process.port.next_frame = self.frames[offset]
        return memoryview(self.data)[offset : offset + nbytes]

    def is_ready(self, offset: int) -> bool:
        if self.copy is not None:
            return self.copy.is_ready(offset)
        return self.ends[offset] <= self.ready_at()

    def is_complete(self) -> bool:
        return len(self.data) <= self.ready_at() if self.copy is None else self.copy.is_complete()


@dataclass
class Offered:
    """One step that a rank offered."""

    job: int
    rank: int
    step: int
    transfer: Any
    process: Process
    at: float


class World:
    """The world of one seed.

    Args:
        seed: Decides all choices.
        directory: Empty, in shared memory.
        trace: Whether each event is kept as a line.
    """

    def __init__(self, seed: int, directory: Path, *, trace: bool = False) -> None:
        self.seed, self.directory = seed, directory
        self.scheduler = Scheduler(seed, trace=trace)
        plan = self.plan = self._make_plan()
        self.store = StoreState(plan.store_kind, plan.part_chunks)
        self.store.fail_share, self.store.slow_seconds = plan.fail_share, plan.slow_seconds
        self.slowest_message_seconds = plan.slowest_message_seconds
        self.runtime_dir = directory / "run"
        self.jobs: list[Job] = []
        self.flushers: list[Process] = []
        self.processes: list[Process] = []
        self.offered: list[Offered] = []
        self.images: dict[tuple[int, int], Image] = {}  # (job, step) → its correct image
        self.torn: set[tuple[int, int]] = set()  # (job, step) whose copy was torn on a rank
        self.doubted: set[tuple[int, int]] = set()  # (attempt, step) that a rank was told is doubtful
        self.points: dict[tuple[str, str], int] = {}
        self.over = False
        self.calm = False  # faults have stopped
        self.flip_next_payload = False
        self.intruder: Lease | None = None
        self.acts = {"any": 0, "visible": 0}  # of flushers on the store
        self.node_lost = 0
        self._ring: tuple[int, Ring] | None = None
        self.proofs = ProofChecks(self)
        self.checks = Checks(self)
        self.scheduler.after_event = self._after_event
        self.flusher_config, self.stager_config, self.trainer_config = _configs(
            self.runtime_dir, plan.keep_last, plan.verify, plan.linger, grows=plan.growth_chunks >= 0
        )

    def _make_plan(self) -> Plan:
        plan = Plan.of(self.scheduler)
        plan.may_freeze(self.seed)
        plan.may_tear(self.seed)
        plan.may_doubt(self.seed)
        plan.may_split(self.seed)
        plan.may_grow(self.seed)
        plan.may_read_slowly(self.seed)
        plan.may_stand(self.seed)
        plan.may_prove(self.seed)
        return plan

    # -- running -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Play the world to its end.

        Raises:
            Broken: An invariant did not hold.
            Stuck: A task waited forever.
        """
        SIM.scheduler, SIM.popen, SIM.reach, SIM.world = self.scheduler, self._popen, self._reach, self
        sim = self.scheduler
        sim.note(f"seed {self.seed}: {self.plan}")
        try:
            sim.process("world", "launcher", self._launch)
            sim.run(until=lambda: self.over, events_max=_EVENTS_MAX, seconds_max=_SECONDS_MAX)
            self.checks.at_the_end()
        finally:
            SIM.reach = lambda point: None
            sim.close()
            if self._ring is not None:
                self._ring[1].close()
            SIM.scheduler = None
            shutil.rmtree(self.directory, ignore_errors=True)

    def _launch(self) -> None:
        """Act as a person or a job scheduler: start jobs in a row, then check that all is written."""
        sim, plan = self.scheduler, self.plan
        for number in range(plan.jobs):
            job = self._start_job(number)
            sim.wait(job.is_over, None, "job")
            sim.wait(None, sim.chance.choice([0.0, 1.0, 10.0, 100.0]), "between jobs")
        self._calm_down()
        self._see_all_written()

    def _calm_down(self) -> None:
        self.scheduler.note("  calm: no more faults, the store is well")
        self.calm = True
        self.store.fail_share = self.store.slow_seconds = 0.0
        if self.plan.full != "ever":
            self.store.full = ""
        for process in self.processes:
            process.stopped_until = -1.0

    def _see_all_written(self) -> None:
        self._await_flushers()
        for attempt in range(3):
            if self.intruder is not None or not self.ring_directory_holds("journal"):
                break
            if self.store.full and attempt:
                break
            self._start_flusher(None)
            self._await_flushers()
        if self.store.uploads and self.intruder is None and not self.store.full:
            self._start_flusher(None)  # as the next job would: its sweep removes leftovers of lost answers
            self._await_flushers()
        self.over = True

    def _await_flushers(self) -> None:
        sim = self.scheduler
        for process in [p for p in self.flushers if p.alive]:
            if self.plan.linger:
                sim.wait(process.is_over, 300.0, "linger")
                self._terminate(process)
            sim.wait(process.is_over, None, "flusher ends")

    def _start_job(self, number: int) -> Job:
        job = Job(self, number, self.plan.ranks, ulfm=self.plan.ulfm)
        first = self._begin_job(job)
        job.stager = self._process("stager", f"stager {number}", lambda: self._stager(job))
        job.stager.port = job.stager_port
        job.stager.notes["job"] = job
        for rank in range(job.ranks):
            process = self._process(
                "rank", f"rank {rank} of job {number}", functools.partial(self._rank, job, rank, first)
            )
            process.port = job.rank_ports[rank]
            process.notes["job"] = job
            job.processes[rank] = process
        for process in [job.stager, *job.processes.values()]:
            job.living += 1
            process.on_end.append(lambda dead: self._job_process_ended(job, dead))
        return job

    def _begin_job(self, job: Job) -> int:
        """Choose the job's length; return its first step."""
        chance = self.scheduler.chance
        self.jobs.append(job)
        found = self._restored()
        first = 0 if found is None or chance.random() < 0.5 else found + 1
        job.steps = self.plan.steps if job.number == 0 else chance.randint(1, self.plan.steps)
        return first

    def _restored(self) -> int | None:
        """The step that a fresh cluster restores, from the real catalog."""
        try:
            return Catalog(pristine(self.store)).get().step
        except HoldfastError:
            return None

    def _process(self, kind: str, name: str, main: Callable[[], None]) -> Process:
        made = self.scheduler.process(kind, name, main)
        self.processes.append(made)
        return made

    # -- the stager ----------------------------------------------------------------------------------------------

    def _stager(self, job: Job) -> None:
        process = self.scheduler.here
        try:
            flusher = attach(self.stager_config)
        except HoldfastError as error:
            process.notes["refused"] = error
            refusal = Welcome.refusal_frame(error)
            for rank in range(job.ranks):
                job.stager_port.send(rank, refusal)
            self.scheduler.wait(None, 10.0, "refuse")
            return
        events = EventLog(None, role="stager")
        port = job.stager_port
        service = StagerService(self.stager_config, port, flusher, events=events, clock=self._clock)  # type: ignore[arg-type]
        process.notes["service"] = service
        try:
            service.run()
        except HoldfastError as error:
            process.notes["ended_with"] = error
        finally:
            service.close()

    def _clock(self) -> float:
        return self.scheduler.now

    # -- the ranks -----------------------------------------------------------------------------------------------

    def _rank(self, job: Job, rank: int, first: int) -> None:
        sim, plan = self.scheduler, self.plan
        port = self._rank_port(job, rank)
        if port is None:
            return
        port.send(encode(Kind.HELLO, body=to_json({"version": VERSION, "pid": 100 + rank, "host": "node"})))
        welcome = self._await_welcome(port)
        if welcome is None:
            return
        again = self._again(job, rank)
        wait_seconds_max = self.trainer_config.stager_seconds_max
        inbox = StagerInbox(
            rank,
            AgreedSteps(wait_seconds_max=wait_seconds_max),
            Schedule(auto=False, wait_seconds_max=wait_seconds_max),
        )
        link = Link(
            self.trainer_config,
            GreetedStager(port, welcome),
            inbox,
            EventLog(None, role="trainer", rank=rank),
            rank=rank,
            reconnect=again,
            clock=self._clock,
        )
        layout = plan.image(0).layout
        ring, kept = restored_from_ring(self, job, link)
        self.checks.ring_is_remembered()
        doubts = random.Random(f"doubt {self.seed} {job.number} {rank}")
        inbox.on_doubt = lambda doubt: self._heard_doubt((*doubt.earlier_attempts, link.job.attempt), doubt)
        copier = start_copier(link, self.trainer_config.copy_seconds_max) if plan.torn_share else None
        sources = [_Source(sim.here) for _ in range(plan.areas)]
        sending: dict[_Source, Any] = {}  # the last transfer of each
        proofs = ProofTeller(self, job, link)
        for step in range(first, first + job.steps):
            made = plan.image((job.number * 5 + step * 7 + first) % _VARIANTS)
            self.images[job.number, step] = made
            sim.wait(None, sim.chance.choice([0.0, 0.01, 1.0, max(5.0, plan.pause_seconds)]), "train")
            reread(self, ring, kept)
            proofs.stepped()
            if sim.chance.random() < 0.7 and len(sending) == len(sources):
                before = sending[sources[0]]
                sim.wait(before.released.is_set, 60.0, "wait for the buffer")
            free = [s for s in sources if s not in sending or sending[s].released.is_set()]
            if not free:
                link.decline(step, DeclineCause.BUSY.because("the buffer is still being sent"))
                continue
            source = free[0]
            sources.remove(source)
            sources.append(source)  # the source filled longest ago comes first
            if sim.chance.random() < 0.03:
                link.decline(step, DeclineCause.BUSY.because("not now"))
                continue
            if copier is not None:
                copier.wait()
                copier.close_gate()
            source.fill(made, rank, step)
            if copier is not None:
                source.copy = self._area(job, source, step)
            elif sim.chance.random() < 0.3:
                self._copy_slowly(source)
            record = SaveRecord(saved_at_unix=1.0, save_seconds=0.0)
            transfer = sending[source] = link.offer(step, source, record, layout)
            if copier is not None and source.copy is not None:
                begin_copy(copier, transfer, source.copy)
            proofs.saved(step)
            self._doubt(link, doubts, first, step)
            self.offered.append(Offered(job.number, rank, step, transfer, sim.here, sim.now))
            if sim.chance.random() < 0.03:
                sim.wait(None, sim.chance.random() * 0.05, "decline late")
                link.decline(step, DeclineCause.BUSY.because("it failed here"))
        reread(self, ring, kept)
        proofs.stepped()
        proofs.ask()
        wait_for = TransferState.DURABLE if sim.chance.random() < 0.7 else TransferState.STAGED
        sim.here.notes["left_staged"] = wait_for is TransferState.STAGED
        link.close(wait_for=wait_for, seconds_max=self.trainer_config.close_seconds_max)
        sim.here.notes["problem"] = link.job.problem

    def _doubt(self, link: Link, chance: random.Random, first: int, step: int) -> None:
        if chance.random() < self.plan.doubt_share:
            steps = chance.randrange(first, step + 1), step
            link.send_message(StagerMessage.doubt(Doubt(link.job.rank, steps, "it was changed by hand")))

    def _heard_doubt(self, attempts: Sequence[int], doubt: Doubt) -> None:
        if doubt.steps is not None:
            self.scheduler.note(f"{self.scheduler.here.name} hears that {doubt.sentence()}")
            steps = range(doubt.steps[0], doubt.steps[1] + 1)
            self.doubted.update((attempt, step) for attempt in attempts for step in steps)

    def _rank_port(self, job: Job, rank: int) -> Any:
        """The port of a rank to its stager, if any."""
        return job.rank_ports[rank]

    def order_of(self, number: int) -> int:
        """Position of a job among all jobs."""
        return number

    def _again(self, job: Job, rank: int) -> Reconnect | None:
        """How a rank reconnects to a lost stager; None: it cannot."""
        return None

    def _area(self, job: Job, source: _Source, step: int) -> Area:
        """The copy of a step, which a fault may tear while it is made."""
        sim, process = self.scheduler, self.scheduler.here
        batches = [FrameBatch(offset, end) for offset, end in source.ends.items()]
        sim.chance.shuffle(batches)  # the order of the next update
        is_torn = sim.chance.random() < self.plan.torn_share
        torn_before = sim.chance.randrange(len(batches)) if batches and is_torn else -1

        def torn() -> None:
            sim.note(f"! a tensor changes while {process.name} copies step {step}")
            self.torn.add((job.number, step))

        return Area(source.data, batches, torn_before, torn)

    def _copy_slowly(self, source: _Source) -> None:
        sim = self.scheduler
        began, seconds, whole = sim.now, 0.001 + sim.chance.random() * 0.5, len(source.data)
        source.ready_at = lambda: int(min(1.0, (sim.now - began) / seconds) * whole)

    def _await_welcome(self, port: Any) -> Welcome | None:
        sim = self.scheduler
        end = sim.now + 300.0
        try:
            while sim.now < end:
                for message in port.poll():
                    frame = decode(message)
                    if frame.kind is Kind.WELCOME:
                        return Welcome.from_frame(frame)
                sim.wait(port.has_news, 30.0, "welcome")
        except HoldfastError as error:
            sim.here.notes["problem"] = error
        port.disconnect(0.0)
        return None

    def _job_process_ended(self, job: Job, dead: Process) -> None:
        """A process of a job ended or was killed: mpirun kills the rest, or ULFM notifies them."""
        job.living -= 1
        said_goodbye = dead is job.stager or dead.port.left
        if said_goodbye and not dead.notes.get("struck") and dead.error is None:
            return
        sim = self.scheduler
        others = [job.stager, *job.processes.values()]
        if dead.notes.get("vanished"):
            sim.later(140.0, lambda: self.checks.deadlines_held(job))
            sim.later(150.0, lambda: self._kill_all(others, "mpirun gives up"))
        elif job.ulfm:
            notice_death(job, dead, sim.chance.random())
            if dead is job.stager:
                sim.later(200.0, lambda: self._kill_all(others, "mpirun ends"))
        else:
            sim.later(sim.chance.random() * 0.3, lambda: self._kill_all(others, "mpirun kills the job"))

    def _kill_all(self, processes: Sequence[Process | None], why: str) -> None:
        for process in processes:
            if process is not None and process.alive:
                process.notes["struck"] = True
                self.scheduler.kill(process, why)

    # -- flushers ------------------------------------------------------------------------------------------------

    def _start_flusher(self, out: _End | None) -> Process:
        number = len(self.flushers)
        process = self._process("flusher", f"flusher {number}", lambda: self._flusher(out))
        if out is not None:
            process.held.append(out.close)
        self.flushers.append(process)
        process.on_end.append(self.checks.flusher_ended)
        return process

    def _flusher(self, out: _End | None) -> None:
        """As `flusher.command`."""
        process = self.scheduler.here
        is_ready = False

        def ready(document: dict[str, Any]) -> None:
            nonlocal is_ready
            is_ready = True
            process.notes["ready"] = True
            if out is not None:
                out.say({"ready": True, **document})

        try:
            run_flusher(self.flusher_config, ready)
        except HoldfastError as error:
            process.notes["ended_with"] = error
            if not is_ready and out is not None:
                out.say({"error": {"code": error.code, "message": str(error)}})

    def open_store(self, _url: str) -> Any:
        """Replaces `holdfast.store.open_store`."""
        client = StoreClient(self, self.scheduler.here)
        from tests.simulation.runtime import _FAKES

        budget = RetryBudget(attempts_max=self.plan.attempts, seconds_max=1e9)
        return Retrying(client, budget=budget, sleep=_FAKES["time"].sleep)

    def _popen(self, *_args: Any, **_kwargs: Any) -> _Popen:
        self.scheduler.check_alive()
        read, write = os.pipe()
        return _Popen(self._start_flusher(_End(write)), read)

    def _terminate(self, process: Process) -> None:
        handler = process.handlers.get(signal.SIGTERM)
        if process.alive and callable(handler):
            self.scheduler.note(f"! {process.name} gets SIGTERM")
            process.notes["terminated"] = True
            handler(signal.SIGTERM, None)

    # -- faults --------------------------------------------------------------------------------------------------

    def _after_event(self) -> None:
        events = self.scheduler.events
        if not self.calm:
            for fault in self.plan.faults:
                if not fault.done and fault.at_event and events >= fault.at_event:
                    self._strike(fault)
        self.checks.after_event()

    def _reach(self, point: str) -> None:
        """A process has reached a named point."""
        sim = self.scheduler
        if sim.unwinding is not None or (point == "ring_seen" and not self.plan.reads_slowly):
            return
        process = sim.here
        sim.check_alive()
        key = (process.kind, point)
        self.points[key] = count = self.points.get(key, 0) + 1
        if not self.calm:
            for fault in self.plan.faults:
                if not fault.done and (fault.kind, fault.point, fault.number) == (*key, count):
                    fault.done = True
                    if fault.what == "stop":
                        self._stop(process)
                        continue
                    process.doomed = True
                    process.notes["struck"] = True
        if point == "ring_seen":
            sim.wait(None, sim.chance.choice([0.0, 0.0, 0.1, 2.0]), point)
        else:
            sim.step(point)

    def _strike(self, fault: Fault) -> None:
        sim = self.scheduler
        if fault.what in {"kill", "stop", "term", "vanish"}:
            kind = "flusher" if fault.what == "term" else fault.kind
            if fault.what == "vanish" and kind == "flusher":
                kind = "rank"
            living = [p for p in self.processes if p.alive and not p.killed and p.kind == kind]
            if not living:
                fault.at_event += 20
                return
            fault.done = True
            victim = sim.chance.choice(living)
            if fault.what == "term":
                self._terminate(victim)
            elif fault.what == "stop":
                self._stop(victim)
            else:
                victim.notes["struck"] = True
                victim.notes["vanished"] = fault.what == "vanish"
                sim.kill(victim, str(fault))
            return
        fault.done = True
        self._befall(fault)

    def _stop(self, process: Process) -> None:
        sim = self.scheduler
        seconds = sim.chance.choice([1.0, 15.0, 60.0])
        sim.note(f"! {process.name} stands still for {seconds:g} s")
        process.stopped_until = sim.now + seconds

    def _befall(self, fault: Fault) -> None:
        """Inject a fault that concerns no single process."""
        sim = self.scheduler
        match fault.what:
            case "job":
                self._kill_job(str(fault))
                if sim.chance.random() < 0.5:
                    self._kill_all([p for p in self.flushers if p.alive], str(fault))
            case "node":
                sim.note("! the node with the ring is lost")
                self.node_lost += 1
                self._kill_all([p for p in self.flushers if p.alive], "node lost")
                if self.jobs:
                    self._kill_all([self.jobs[-1].stager], "node lost")
                self.checks.node_lost()
                shutil.rmtree(self.runtime_dir, ignore_errors=True)
            case "wire":
                self.flip_next_payload = True
            case "rot":
                self._rot()
            case "full":
                sim.note("! the store is full")
                self.store.full = "No space left on device (needed 9 bytes, free 0)"
                if self.plan.full == "window":
                    sim.later(sim.chance.choice([5.0, 100.0]), self._room_again)
            case "intruder":
                sim.note("! another host takes the run over")
                other = Identity("other host", "b", "n", 7, 1)
                self.checks.intruded()
                self.intruder = Lease.acquire(pristine_writer(self.store), takeover=True, identity=other)

    def _kill_job(self, why: str) -> None:
        job = self.jobs[-1]
        self._kill_all([job.stager, *job.processes.values()], why)

    def _room_again(self) -> None:
        self.scheduler.note("! the store has room again")
        self.store.full = ""

    def _rot(self) -> None:
        """Flip a bit of the ring."""
        ring = self.ring()
        if ring is None:
            return
        chance = self.scheduler.chance
        full = [slot for slot in range(ring.ring_chunks) if ring.state(slot) is SlotState.FULL]
        if not full:
            return
        slot = chance.choice(full)
        record = ring.record(slot)
        at = chance.randrange(record.nbytes)
        ring.slot_memory(slot)[at] ^= 1 << chance.randrange(8)
        self.scheduler.note(f"! a bit flips in slot {slot}: step {record.step}, chunk {record.chunk}")
        self.checks.tainted.add(CheckpointId(record.attempt, record.step))

    def before_act(self, process: Process, what: str, name: str) -> None:
        """Called when a flusher has checked its claim and is about to use the store; may freeze the flusher."""
        if process.kind != "flusher" or self.calm or self.intruder is not None:
            return
        visible = name.startswith("step-") and what in {"publish", "create", "write", "delete"}
        for kind in ("any", "visible") if visible or what == "sweep" else ("any",):
            self.acts[kind] += 1
            for fault in self.plan.faults:
                if (
                    fault.what == "freeze"
                    and not fault.done
                    and (fault.point, fault.number)
                    == (
                        kind,
                        self.acts[kind],
                    )
                ):
                    fault.done = True
                    self._freeze(process, f"{what} {name}")

    def _freeze(self, process: Process, where: str) -> None:
        sim = self.scheduler
        seconds = sim.chance.choice([5.0, 60.0])
        sim.note(f"! {process.name} stands still before {where} for {seconds:g} s")
        process.stopped_until = sim.now + seconds
        sim.later(seconds / 2, self._win)
        sim.step("frozen")

    def _win(self) -> None:
        """Another host takes the run over, and has published and verified each step that is under way here."""
        if self.intruder is not None:
            return
        sim, state = self.scheduler, self.store
        self.checks.intruded()
        claim = self.intruder = Lease.acquire(
            pristine_writer(state), takeover=True, identity=Identity("other host", "b", "n", 7, 1)
        )
        sim.note(f"! another host takes the run over, as attempt {claim.attempt}")
        for step in sorted({offer.step for offer in self.offered}):
            file = choose_name(pristine(state), CheckpointId(claim.attempt, step), ())
            manifest = manifest_of(_WINNERS, step=step, attempt=claim.attempt, file=file)
            state.objects[file], state.objects[manifest_name(file)] = _WINNERS, manifest.to_bytes()
            for name in (file, manifest_name(file)):
                self.checks.winners[name] = state.objects[name]
        token = f"{writer_id(claim.attempt)}/0"
        state.uploads[token] = OpenUpload("step-000000999.pt", token.partition("/")[0], 1, 1)
        self.checks.winners_upload, self.checks.winners_attempt = token, claim.attempt
        state.version += 1

    # -- called by the fakes -------------------------------------------------------------------------------------

    def ring(self) -> Ring | None:
        """Map the current ring for reading."""
        if self._journal is None:
            self._journal = str(self.ring_directory() / "journal")
        try:
            inode = os.stat(self._journal).st_ino  # noqa: PTH116 - called after most events
        except OSError:
            return None
        if self._ring is None or self._ring[0] != inode:
            if self._ring is not None:
                self._ring[1].close()
                self._ring = None
            try:
                self._ring = (inode, Ring.attach(self.ring_directory()))
            except HoldfastError:
                return None  # being made
        if self.plan.growth_chunks >= 0:
            self._ring[1].refresh_slots()
        return self._ring[1]

    def ring_directory(self) -> Path:
        if self._directory is None:
            from holdfast.ring.directory import runtime_directory

            self._directory = runtime_directory(URL, self.runtime_dir)
        return self._directory

    _directory: Path | None = None
    _journal: str | None = None

    def ring_directory_holds(self, name: str) -> bool:
        return (self.ring_directory() / name).exists()

    def receive_posted(self, rank: int, slot: int) -> None:
        self.checks.slot_is_filling(rank, slot, None)

    def payload_lands(self, rank: int, slot: int, what: tuple[int, int]) -> None:
        self.checks.slot_is_filling(rank, slot, what)

    def payload_landed(self, rank: int, slot: int, memory: memoryview, pieces: Any) -> None:
        ring = self.ring() if self.flip_next_payload else None
        if ring is not None:  # else a fenced flusher has removed it, and no process will read it
            self.flip_next_payload = False
            record = ring.record(slot)
            memory[pieces[0].offset] ^= 4
            self.scheduler.note(f"! a bit flips on the wire: step {record.step}, chunk {record.chunk}")
            self.checks.tainted.add(CheckpointId(record.attempt, record.step))

    def store_act(self, process: Process, what: str, name: str) -> None:
        self.checks.store_act(process, what, name)

    def object_written(self, process: Process, name: str) -> None:
        self.checks.object_written(process, name)

    def upload_swept(self, upload: Any) -> None:
        self.checks.upload_swept(upload)


@functools.cache
def _configs(
    runtime_dir: Path, keep_last: int, verify: bool, linger: bool, *, grows: bool
) -> tuple[FlusherConfig, StagerConfig, TrainerConfig]:
    common: dict[str, Any] = {
        "store": URL,
        "chunk_bytes": CHUNK_BYTES,
        "ring_bytes": None if grows else CHUNK_BYTES * RING_CHUNKS,
        "keep_last": keep_last,
        "verify": verify,
        "linger": linger,
        "writers": 2,
        "runtime_dir": runtime_dir,
    }
    return (
        FlusherConfig(**common),
        StagerConfig(**common, offer_seconds_max=20.0, chunk_seconds_max=40.0, start_seconds_max=60.0),
        TrainerConfig(stager_seconds_max=30.0, close_seconds_max=900.0),
    )


class _Popen:
    """As `subprocess.Popen`, for a flusher."""

    def __init__(self, process: Process, read: int) -> None:
        self._process = process
        self.pid = process.number
        self.stdout = os.fdopen(read, "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if not self._process.alive:
            error = self._process.notes.get("ended_with")
            self.returncode = -9 if self._process.notes.get("struck") else error.exit_code if error else 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        SIM.now.wait(lambda: not self._process.alive, timeout, "wait for the flusher")
        code = self.poll()
        return 0 if code is None else code

    def kill(self) -> None:
        self._process.doomed = True
        self._process.notes["struck"] = True
        sim = SIM.now
        sim.later(0.0, lambda: sim.kill(self._process, "by its starter"))


class _End:
    """The flusher's end of the pipe on which it reports that it is ready."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, document: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(document).encode() + b"\n")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def pristine_writer(state: StoreState) -> Any:
    """The store as another host sees it, without faults."""

    class Writer:
        url = URL

        def list(self) -> Any:
            return pristine(state).list()

        def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
            return bytes(pristine(state).read(name, bytes_max))

        def create(self, name: str, data: bytes) -> bool:
            state.version += 1
            return state.objects.setdefault(name, data) is data

        def delete(self, name: str) -> None:
            state.version += 1
            state.objects.pop(name, None)

    return Writer()
