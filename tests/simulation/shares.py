"""Several flushers that write one file, each on a node of its own, and a store shared by all.

    python -m tests.simulation.shares --first 0 --count 500
    python -m tests.simulation.shares --seed 17 --trace
    python -m tests.simulation.shares --mutation seal_of_another_write --count 500

The flushers are real (`run_flusher`): lease, engine, pipeline, recovery. The stagers are simulated: each sends its
share, and attaches again to the next flusher. Flushers, stagers and whole nodes die or freeze at any operation; the
next process of a stager that died is sent its share again; the store fails and loses answers; a stranger's seal lies
where one is awaited. A listed file must be whole, and a step that all stagers have staged must be listed in the end,
unless its bytes are lost.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from tests.simulation.mutations import Mutation
from tests.simulation.runtime import SIM, readable
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.share_mutations import SHARE_MUTATIONS
from tests.simulation.store import URL, StoreClient, StoreState, pristine
from tests.support.images import Image

_SECONDS_MAX, _EVENTS_MAX = 60_000.0, 150_000
_RING_CHUNKS = 8
_POINTS = (
    *(
        "staged_heard",
        "part_begun",
        "part_written",
        "part_recorded",
        "crcs_put",
        "share_sealed",
        "share_sealed",
    ),
    *("shares_begun", "all_sealed", "file_published", "manifest_written", "recovering"),
)


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Fault:
    """A fault of one share: at an event of the world, at a point of its flusher, or at one of its operations."""

    what: str
    share: int
    at_event: int = 0
    point: str = ""
    number: int = 1
    seconds: float = 0.0
    done: bool = False


@dataclass
class Plan:
    """The choices of a seed, made before anything runs."""

    writers: int
    shape: int
    part_chunks: int
    kind: str
    steps: int
    jobs: int
    fail_share: float
    abort_share: float
    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def of(cls, chance: random.Random) -> Plan:
        plan = cls(
            writers=chance.choice([2, 3, 3, 4]),
            shape=chance.choice([0, 1, 1, 2, 3, 4, 5, 5]),
            part_chunks=chance.choice([1, 1, 2]),
            kind=chance.choice(["parts", "file"]),
            steps=chance.choice([1, 1, 2]),
            jobs=chance.choice([1, 1, 2]),
            fail_share=chance.choice([0.0, 0.0, 0.05]),
            abort_share=chance.choice([0.0, 0.0, 0.0, 0.2]),
        )
        for _ in range(chance.choice([0, 1, 1, 1, 2, 2])):
            share = chance.choice([0, 0, *range(plan.writers)])
            what = chance.choices(["kill", "stager", "node", "freeze", "stranger"], [8, 3, 4, 3, 1])[0]
            fault = Fault(what, share, at_event=int(2 ** chance.uniform(5, 11)))
            if what in {"kill", "node"} and chance.random() < 0.7:
                fault.at_event, fault.point = 0, chance.choice(_POINTS)
                fault.number = chance.choice([1, 1, 1, 2])
            if what == "freeze":
                fault.at_event, fault.number = 0, int(2 ** chance.uniform(0, 6))
                fault.seconds = chance.choice([20.0, 100.0, 100.0, 2000.0])
            plan.faults.append(fault)
        if chance.random() < 0.4:
            number, seconds = int(2 ** chance.uniform(0, 4)), chance.choice([0.0, 1.0, 10.0, 20.0, 100.0])
            share = chance.randrange(plan.writers)
            plan.faults.append(Fault("again", share, number=number, seconds=seconds))
        return plan

    @property
    def must_list_all(self) -> bool:
        """Nothing may be lost: a stager comes again in time, and that is all."""
        again = all(
            fault.what == "again" and fault.seconds < LOST_STAGER_SECONDS_MAX for fault in self.faults
        )
        return again and self.fail_share == self.abort_share == 0.0


class Checks:
    """Receives the reports of the simulation's ring; ignores most."""

    def __init__(self, world: SharesWorld) -> None:
        self._world = world
        self.ring_changed = False

    def staged(self, key: Any, layout_digest: str) -> None: ...

    def forgotten(self, ring: Any, key: Any) -> None: ...


class SharesWorld:
    """One seed."""

    def __init__(self, seed: int, directory: Path, *, trace: bool) -> None:
        self.seed, self.directory = seed, directory
        self.scheduler = Scheduler(seed, trace=trace)
        plan = self.plan = Plan.of(random.Random(f"shares {seed}"))
        self.store = StoreState(plan.kind, plan.part_chunks)
        self.store.fail_share = plan.fail_share
        self.checks = Checks(self)
        self.processes: list[Process] = []
        self.flushers: dict[int, Process] = {}
        self.nodes = dict.fromkeys(range(plan.writers), 0)  # share → its machine
        self.writers = plan.writers
        self.job = 0
        self.job_attempts: dict[int, int] = {}
        self.job_writers: dict[int, int] = {}
        self.stagers: list[Process] = []
        self.played: dict[int, Stager] = {}
        self.stager_acted: dict[int, int] = {}
        self.over = self.calm = False
        self.usurpers: list[Process] = []
        self.acts: dict[int, int] = {}
        self.points: dict[tuple[int, str], int] = {}
        self.staged: dict[tuple[int, int], set[int]] = {}
        self.excused: set[tuple[int, int]] = set()  # (attempt, step) that may be lost
        self.all_excused = False
        self.seen_version = -1
        self.listed: set[str] = set()
        self.scheduler.after_event = self._after_event

    # -- running -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        SIM.scheduler, SIM.reach, SIM.world = self.scheduler, self._reach, self
        sim = self.scheduler
        sim.note(f"seed {self.seed}: {self.plan}")
        try:
            sim.process("world", "launcher", self._launch)
            sim.run(until=lambda: self.over, events_max=_EVENTS_MAX, seconds_max=_SECONDS_MAX)
            self._see_the_end()
        finally:
            SIM.reach = lambda point: None
            sim.close()
            SIM.scheduler = None
            shutil.rmtree(self.directory, ignore_errors=True)

    def _launch(self) -> None:
        sim, plan = self.scheduler, self.plan
        for job in range(plan.jobs):
            self.job = job
            self.writers = self.job_writers[job] = (
                plan.writers if job == 0 else sim.chance.choice([1, plan.writers])
            )
            for share in range(self.writers):
                self._start_flusher(share)
            self.stagers = [self._start_stager(job, share) for share in range(self.writers)]
            while any(stager.alive for stager in self.stagers):
                alive = sum(stager.alive for stager in self.stagers)
                sim.wait(functools.partial(self._fewer_stagers, alive), 5.0, "job")
                self._restart_flushers()
                if any(stager.notes.get("lost") for stager in self.stagers):
                    # The ranks have lost a stager: their job ends some time later.
                    sim.wait(None, sim.chance.choice([0.0, 1.0, 30.0]), "job ends")
                    for stager in self.stagers:
                        self._kill(stager, "its job ended")
            self._restart_flushers()
            sim.wait(None, sim.chance.choice([0.0, 1.0, 100.0]), "between jobs")
        self.calm, self.store.fail_share = True, 0.0
        for process in self.processes:
            process.stopped_until = -1.0
        for _ in range(4):
            for share in range(plan.writers):
                self._start_flusher(share) if self._has_ring(share) else None
            for process in [*self.flushers.values(), *self.usurpers]:
                sim.wait(process.is_over, 5000.0, "flusher ends")
                if process.alive:
                    raise Broken(f"{process.name} does not end: {sim.who_waits()}")
        # The run's next jobs, on a new machine: the second removes the files that the first has voided.
        self.nodes[0] += 1
        self.writers = 1
        for _ in range(2):
            self._start_flusher(0)
            sim.wait(self.flushers[0].is_over, None, "last flusher")
        self.over = True

    def _fewer_stagers(self, than: int) -> bool:
        return sum(stager.alive for stager in self.stagers) < than

    def _has_ring(self, share: int) -> bool:
        return bool(list(self._place(share).glob("*/journal")))

    def _place(self, share: int) -> Path:
        return self.directory / f"node-{share}-{self.nodes[share]}"

    def _restart_flushers(self) -> None:
        for share in range(self.writers):
            stager = self.stagers[share]
            if not self.flushers[share].alive and (stager.alive or self._has_ring(share)):
                self._start_flusher(share)

    def _start(self, kind: str, name: str, main: Callable[[], None], share: int) -> Process:
        made = self.scheduler.process(kind, name, main)
        made.notes["share"], made.notes["host"] = share, f"node-{share}-{self.nodes[share]}"
        self.processes.append(made)
        return made

    def _start_flusher(self, share: int) -> None:
        known = self.flushers.get(share)
        if known is not None and known.alive:
            return
        config = _config(self._place(share), share, self.writers, self.plan.writers)
        number = len(self.processes)
        self.flushers[share] = self._start(
            "flusher", f"flusher {share} #{number}", functools.partial(self._flusher, config), share
        )

    def _flusher(self, config: Any) -> None:
        from flusher.lifetime import run_flusher
        from holdfast.errors import HoldfastError

        try:
            run_flusher(config, lambda _: None)
        except HoldfastError as error:
            self.scheduler.here.notes["ended_with"] = error

    def open_store(self, _url: str) -> Any:
        """Replaces `holdfast.store.open_store`."""
        from holdfast.store.retrying import RetryBudget, Retrying
        from tests.simulation.runtime import _FAKES

        client = StoreClient(self, self.scheduler.here)  # type: ignore[arg-type]
        return Retrying(
            client, budget=RetryBudget(attempts_max=5, seconds_max=1e9), sleep=_FAKES["time"].sleep
        )

    def _start_stager(self, job: int, share: int, again: Again | None = None) -> Process:
        self.played[share] = stager = Stager(self, job, share, again)
        name = f"stager {share} of job {job}{', again' if again else ''}"
        return self._start("stager", name, stager.run, share)

    def image(self, step: int) -> Image:
        from tests.simulation.images import image

        return image(self.plan.shape, 2, 0, step)

    # -- faults --------------------------------------------------------------------------------------------------

    def _kill(self, process: Process, why: str) -> None:
        sim = self.scheduler
        process.doomed = True
        sim.later(0.0, lambda: sim.kill(process, why))
        sim.wait(process.is_over, None, "kill")

    def _after_event(self) -> None:
        if not self.calm:
            for fault in self.plan.faults:
                if not fault.done and fault.at_event and self.scheduler.events >= fault.at_event:
                    fault.done = True
                    self._strike(fault)
        if self.store.version != self.seen_version:
            self.seen_version = self.store.version
            self._see_listed()

    def _strike(self, fault: Fault) -> None:
        """Inject a fault, from the hub."""
        sim, share = self.scheduler, fault.share
        stagers = [one for one in self.processes if one.kind == "stager" and one.notes["share"] == share]
        flusher = self.flushers.get(share)
        match fault.what:
            case "kill" if flusher is not None:
                sim.kill(flusher, "a fault")
            case "stager":
                for one in stagers:
                    one.notes["lost"] = True
                    sim.kill(one, "a fault")
            case "again" if stagers[-1].alive:
                sim.kill(stagers[-1], "a fault, and its next process comes")
                again = Again(self.played[share], fault.seconds)
                self.stagers[share] = self._start_stager(self.job, share, again)
            case "node":
                self._excuse_unsealed(share)
                for one in stagers:
                    one.notes["lost"] = True
                for one in [*stagers, *([flusher] if flusher is not None else [])]:
                    sim.kill(one, "its machine is gone")
                shutil.rmtree(self._place(share), ignore_errors=True)
                self.nodes[share] += 1
            case "stranger":
                self._strange_seal(share)

    def _excuse_unsealed(self, share: int) -> None:
        for key, shares in self.staged.items():
            if share in shares and f"{_folder(key)}seal-{share + 1}" not in self.store.objects:
                self.excused.add(key)
        # Steps that only this share's ring has as staged, and that no stager has reported yet.
        attempt = self.job_attempts.get(self.job, 0)
        self.excused |= {
            (attempt, step)
            for step in range(self.plan.steps)
            if f"{_folder((attempt, step))}seal-{share + 1}" not in self.store.objects
        }

    def _strange_seal(self, share: int) -> None:
        """Put another job's seal, of other bytes, where this job's is awaited."""
        for key in [key for key in self.staged if f"{_folder(key)}start" in self.store.objects][-1:]:
            from holdfast.checkpoints.share_records import ShareRecords, ShareSeal
            from holdfast.image.checkpoint_id import CheckpointId

            records = ShareRecords(pristine(self.store), CheckpointId(*key))
            start = records.start()
            if start is None or share >= start.count:
                return
            chunks = _shares(self, self.image(key[1]).layout.chunks, start.count).chunks_of(share)
            made = ShareSeal(
                attempt=key[0],
                step=key[1],
                host="stranger",
                write_id="w000001-stranger",
                index=share,
                count=start.count,
                entry_crcs=_entry_crcs(self.image(key[1]), chunks),
                layout_digest=start.layout_digest,
                first_chunk=chunks.start,
                chunk_crcs=tuple(7 for _ in chunks),
                staged_at_unix=1.0,
            )
            from holdfast.sealed import seal

            name = f"{_folder(key)}seal-{share + 1}"
            self.store.objects.setdefault(name, seal(made.model_dump_json().encode(), "share_crc32"))
            self.all_excused = True
            self.scheduler.note(f"! a stranger's seal stands at {name}")

    def _reach(self, point: str) -> None:
        sim = self.scheduler
        if sim.unwinding is not None:
            return
        process = sim.here
        sim.check_alive()
        if process.kind == "flusher":
            key = (process.notes["share"], point)
            self.points[key] = count = self.points.get(key, 0) + 1
            for fault in self.plan.faults:
                if self.calm or fault.done or (fault.share, fault.point, fault.number) != (*key, count):
                    continue
                fault.done = True
                sim.later(0.0, functools.partial(self._strike, fault))
        sim.step(point)

    def before_act(self, process: Process, what: str, name: str) -> None:
        """Called before a flusher's operation on the store; may freeze the flusher."""
        if process.kind != "flusher" or self.calm:
            return
        share = process.notes["share"]
        self.acts[share] = self.acts.get(share, 0) + 1
        for fault in self.plan.faults:
            if (
                fault.what == "freeze"
                and not fault.done
                and (fault.share, fault.number) == (share, self.acts[share])
            ):
                fault.done = True
                self.all_excused = self.all_excused or fault.seconds > 500
                self.scheduler.note(
                    f"! {process.name} stands still before {what} {name} for {fault.seconds} s"
                )
                process.stopped_until = self.scheduler.now + fault.seconds
                if share == 0 and fault.seconds >= 100.0 and self.scheduler.chance.random() < 0.7:
                    self.scheduler.later(fault.seconds / 10, self._usurp)
                self.scheduler.step("frozen")

    def stager_acts(self, share: int) -> None:
        """In its process: here it may die."""
        self.stager_acted[share] = self.stager_acted.get(share, 0) + 1
        for fault in self.plan.faults:
            if fault.what == "again" and (fault.share, fault.number) == (share, self.stager_acted[share]):
                fault.done = True
                self.scheduler.later(0.0, functools.partial(self._strike, fault))
                self.scheduler.step("killed")

    def _usurp(self) -> None:
        """Freeze the lead while another host takes its run over."""
        if self.calm:
            return
        self._excuse_unsealed(0)
        self.scheduler.note("! another host takes the run over")
        config = _config(self.directory / f"usurper-{len(self.processes)}", 0, 1, self.plan.writers)
        made = self._start(
            "flusher", f"usurper #{len(self.processes)}", functools.partial(self._flusher, config), 0
        )
        made.notes["host"] = "usurper"
        self.usurpers.append(made)

    # -- called by the store -------------------------------------------------------------------------------------

    def store_act(self, process: Process, what: str, name: str) -> None: ...

    def object_written(self, process: Process, name: str) -> None: ...

    def upload_swept(self, upload: Any) -> None: ...

    # -- invariants ----------------------------------------------------------------------------------------------

    def _see_listed(self) -> None:
        """Every listed file is whole, and is that step."""
        from holdfast.image.manifest import Manifest

        objects = self.store.objects
        for name in objects:
            if not name.startswith("step-") or not name.endswith(".json"):
                continue
            manifest = Manifest.from_bytes(objects[name], source=name)
            image, data = self.image(manifest.step), objects.get(manifest.file)
            if data is None:
                continue  # the flusher that has just listed it has withdrawn it, or still has to notice
            if data != image.final:
                first = next(
                    (n for n, (a, b) in enumerate(zip(data, image.final, strict=False)) if a != b), len(data)
                )
                raise Broken(f"{name} is listed, and its bytes differ from byte {first} on")
            _see_sums(manifest, data)
            self.listed.add(name)

    def _see_the_end(self) -> None:
        from holdfast.image.manifest import Manifest

        objects = self.store.objects
        found = {
            tuple(Manifest.from_bytes(data, source=name).order)
            for name, data in objects.items()
            if name.startswith("step-") and name.endswith(".json")
        }
        for name in objects:
            if (
                name.startswith("step-")
                and name.endswith(".json")
                and name.replace(".json", ".pt") not in objects
            ):
                raise Broken(f"{name} is listed, and its file is not there")
        for key, shares in self.staged.items():
            writers = self.job_writers[self._job_of(key)]
            count = _shares(self, self.image(key[1]).layout.chunks, writers).count
            if shares >= set(range(count)) and key not in self.excused | found and not self.all_excused:
                raise Broken(
                    f"step {key[1]} of attempt {key[0]} was staged by all, and is not listed: {sorted(found)}"
                )
        if self.plan.must_list_all:
            steps = {step for attempt, step in found if attempt == self.job_attempts[0]}
            if len(steps) < self.plan.steps:
                raise Broken(f"a stager came again in time, and listed are {sorted(found)}")
        left = [name for name in objects if name.startswith(".holdfast/shares/")]
        intents = [name for name in objects if name.startswith(".holdfast/intent-")]
        if left or intents or self.store.uploads:
            raise Broken(f"left behind: {left} {intents} {list(self.store.uploads)}")

    def _job_of(self, key: tuple[int, int]) -> int:
        return next(job for job, attempt in self.job_attempts.items() if attempt == key[0])


@dataclass
class Again:
    """A stager's next process. `before`: the one before it; `seconds`: how long nobody was there."""

    before: Stager
    seconds: float


class Stager:
    """One simulated stager, in its process: sends its share of each step, and continues with the next flusher."""

    def __init__(self, world: SharesWorld, job: int, share: int, again: Again | None = None) -> None:
        self.world, self.job, self.share, self.again = world, job, share, again
        self.identity = ""
        self.left: set[int] = set()  # steps that are in the ring and that were not sent to this process
        self.writers = world.job_writers[job]
        self.chance = random.Random(f"stager {world.seed} {job} {share}")
        self.channel: Any = None
        self.ring: Any = None
        self.attempt = 0
        self.begun: dict[int, str] = {}  # step → receiving, staged, aborted
        self.ended: dict[int, str] = {}
        self.finishes = self.drained = False

    def run(self) -> None:
        from holdfast.errors import HoldfastError

        try:
            if self.again is not None:
                SIM.now.wait(None, self.again.seconds, "start")
            self._attach()
            if self.again is not None:
                self._take_up(self.again)
            for step in range(self.world.plan.steps):
                self._save(step)
            self._await(lambda: self.begun.keys() <= self.ended.keys())
            self.finishes = True
            self.channel.send("finish")
            self._await(lambda: self.drained or self.channel.closed)
        except (HoldfastError, FileNotFoundError) as error:  # a fenced flusher has removed its ring
            self.world.scheduler.note(f"  stager {self.share} gives up: {error}")
            self.world.scheduler.here.notes["lost"] = True
        finally:
            if self.ring is not None:
                self.ring.close()

    def _attach(self) -> None:
        """Attach to the flusher of this share, once there is one. A member first learns the lead's attempt."""
        from holdfast.errors import PeerLost
        from holdfast.ring import doorbell as ipc
        from holdfast.ring.directory import runtime_directory
        from holdfast.ring.ring import Ring

        sim, world = SIM.now, self.world
        if self.share:
            sim.wait(lambda: self.job in world.job_attempts, None, "lead's attempt")
        before = 0 if self.again is None or self.attempt else self.again.before.attempt
        lead_attempt = world.job_attempts[self.job] if self.share else before
        directory = runtime_directory(URL, world._place(self.share), share=self.share)
        until = sim.now + 5000.0
        while True:
            try:
                self.channel = ipc.connect(directory / ipc.SOCKET_NAME)
            except PeerLost:
                if sim.now > until:
                    raise
                sim.wait(None, 1.0, "flusher")
                continue
            self.channel.send(
                "hello",
                version=ipc.VERSION,
                pid=1,
                attempt=self.attempt,
                share=[self.share, self.writers],
                lead_attempt=lead_attempt,
                standing=True,
            )
            welcome = self._answer()
            if welcome is None:
                sim.wait(None, 1.0, "flusher")
                continue
            break
        if self.attempt and not welcome.fields["resumed"]:
            raise PeerLost("the flusher has another ring")
        if not self.attempt:
            self.ring = Ring.attach(directory)
            self.attempt, self.identity = self.ring.attempt, self.ring.identity
            self.ring.hold(self.attempt)
            if self.share == 0 and before and self.attempt != before:
                raise PeerLost("another attempt has begun, for which the ranks leave all stagers")
            if self.share == 0:
                world.job_attempts[self.job] = self.attempt
        else:
            self._replay()

    def _take_up(self, again: Again) -> None:
        """The ranks offer again what was not staged, unless the ring is another one, or it is late."""
        before, is_late = again.before, again.seconds > LOST_STAGER_SECONDS_MAX
        for step, state in before.begun.items():
            said = self.ring.checkpoint(self.attempt, step)
            staged = state == "staged" or (said is not None and said.state == "staged")
            if not staged and not is_late and self.identity == before.identity and step not in before.ended:
                continue
            self.begun[step] = state
            self.left.add(step)
            if staged:
                self.world.staged.setdefault((self.attempt, step), set()).add(self.share)
            elif said is not None:
                self._tell("abort", step, reason="no rank has offered it again")
            if step in before.ended or said is None:
                self.ended[step] = before.ended.get(step, "not heard")

    def _answer(self) -> Any:
        while True:
            SIM.now.wait(lambda: self.channel.closed or bool(readable([self.channel])()), 100.0, "welcome")
            for message in self.channel.poll(most=1):
                if message.kind == "welcome":
                    return message
                if message.kind == "refused":
                    SIM.now.note(f"    stager {self.share} is refused: {message.fields['message']}")
            if self.channel.closed:
                return None

    def _replay(self) -> None:
        from holdfast.ring.journal import SlotState

        for step, state in self.begun.items():
            if step in self.ended:
                continue
            if step in self.left:
                said = self.ring.checkpoint(self.attempt, step)
                if said is None:
                    self.ended[step] = "not heard"
                elif said.state != "staged":
                    self._tell("abort", step, reason="given up while there was no flusher")
                continue
            self._tell("begin", step, layout_digest=self.world.image(step).layout.digest)
            for slot in range(self.ring.ring_chunks):
                record = self.ring.record(slot)
                if record.state is SlotState.FULL and record.step == step:
                    self.channel.send("chunk", slot=slot)
            if state == "staged":
                self._tell("staged", step)
            elif state == "aborted":
                self._tell("abort", step, reason="a rank is gone")
        if self.finishes:
            self.channel.send("finish")

    def _tell(self, kind: str, step: int, **fields: Any) -> None:
        self.channel.send(kind, attempt=self.attempt, step=step, **fields)

    def _await(self, predicate: Callable[[], Any]) -> None:
        while not predicate():
            SIM.now.wait(
                lambda: self.channel.closed or bool(readable([self.channel])()) or predicate(), 60.0, "stager"
            )
            for message in self.channel.poll():
                self._hear(message)
            if self.channel.closed and not self.drained:
                self._attach()

    def _hear(self, message: Any) -> None:
        step = message.fields.get("step", 0)
        match message.kind:
            case "durable":
                objects = self.world.store.objects
                if message.fields["file"].replace(".pt", ".json") not in objects:
                    raise Broken(
                        f"stager {self.share} hears that step {step} is durable, and it is not listed"
                    )
                self.ended[step] = "durable"
            case "failed":
                self.ended.setdefault(step, "failed")
            case "drained":
                self.drained = True

    def _save(self, step: int) -> None:
        world, image = self.world, self.world.image(step)
        shares = _shares(world, image.layout.chunks, self.writers)
        chunks = list(shares.chunks_of(self.share)) if self.writers > 1 else list(range(image.layout.chunks))
        if not chunks or step in self.begun:
            return
        digest = self.ring.put_layout(image.layout)
        self.ring.write_checkpoint(self.attempt, step, "receiving", digest, {})
        self.begun[step] = "receiving"
        self._tell("begin", step, layout_digest=digest)
        while chunks:
            free = self._free()
            self._await(lambda: self._free() or step in self.ended)
            if step in self.ended:
                return
            free = self._free()
            world.stager_acts(self.share)
            at = self.chance.randrange(len(chunks)) if len(free) > _RING_CHUNKS // 2 else 0
            self._fill(image, step, chunks.pop(at), self.chance.choice(free))
            SIM.now.wait(None, self.chance.choice([0.0, 0.0, 0.1, 2.0]), "next chunk")
            if self.chance.random() < world.plan.abort_share / 4 and not world.calm:
                self.begun[step] = "aborted"
                self._tell("abort", step, reason="a rank is gone")
                world.excused.add((self.attempt, step))
                return
        if step in self.ended:
            return
        self.ring.write_checkpoint(self.attempt, step, "staged", digest, {"stager": {"staged_at_unix": 1.5}})
        world.stager_acts(self.share)
        self.begun[step] = "staged"
        world.staged.setdefault((self.attempt, step), set()).add(self.share)
        self._tell("staged", step)

    def _free(self) -> list[int]:
        from holdfast.ring.journal import SlotState

        return [slot for slot in range(self.ring.ring_chunks) if self.ring.state(slot) is SlotState.FREE]

    def _fill(self, image: Image, step: int, chunk: int, slot: int) -> None:
        self.ring.mark_filling(slot, self.attempt, step, chunk)
        self.world.stager_acts(self.share)
        data = image.chunk_bytes(chunk)
        self.ring.slot_memory(slot)[: len(data)] = data
        self.ring.mark_full(slot, image.sources(chunk), len(data))
        self.channel.send("chunk", slot=slot)


def _folder(key: tuple[int, int]) -> str:
    return f".holdfast/shares/a{key[0]:06d}-s{key[1]:09d}."


def _shares(world: SharesWorld, chunks: int, writers: int) -> Any:
    from holdfast.image.shares import Shares

    return Shares(chunks, world.plan.part_chunks, writers)


def _entry_crcs(image: Image, chunks: range) -> tuple[int, ...]:
    from holdfast.image.share_sums import entry_pieces

    return tuple(7 for _ in entry_pieces(image.layout, chunks))


def _see_sums(manifest: Any, data: bytes) -> None:
    from holdfast.crc import crc32

    if manifest.image_crc32 != crc32(data):
        raise Broken(f"{manifest.file}: its manifest states another CRC-32 of the image")
    for entry in manifest.entries:
        if entry.crc32 != crc32(data[entry.offset : entry.offset + entry.nbytes]):
            raise Broken(f"{manifest.file}: its manifest states another CRC-32 of {entry.name}")


@functools.cache
def _config(place: Path, share: int, writers: int, _writers: int) -> Any:
    from holdfast.config import FlusherConfig
    from tests.simulation.images import CHUNK_BYTES

    return FlusherConfig(
        store=URL,
        chunk_bytes=CHUNK_BYTES,
        ring_bytes=CHUNK_BYTES * _RING_CHUNKS,
        keep_last=0,
        verify=False,
        writers=2,
        runtime_dir=place,
        share=f"{share + 1}/{writers}",
    )


def _prepare() -> Path:
    """As `tests.simulation.engine.prepare`, with machines, and with parts as large as the store's."""
    from tests.simulation import engine

    engine.prepare()
    import flusher.engine
    from holdfast.checkpoints import identity

    def of_this_process(cls: type[identity.Identity]) -> identity.Identity:
        here = SIM.now.here
        return identity.Identity(here.notes.get("host", "node"), "boot", "namespace", here.number, 1)

    identity.Identity.of_this_process = classmethod(of_this_process)  # type: ignore[method-assign,assignment]
    setattr(flusher.engine, "part_chunks_for", lambda *_: SIM.world.plan.part_chunks)  # noqa: B010
    assert engine._base is not None
    return engine._base


def run_seed(seed: int, *, trace: bool = False) -> tuple[str, int, list[str]]:
    """Play one seed; return its failure, the number of events, and the trace."""
    import gc

    directory = _prepare() / "shares"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    random.seed(seed)
    world = SharesWorld(seed, directory, trace=trace)
    failure = ""
    try:
        world.run()
    except AssertionError as error:
        failure = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a simulation that breaks is a finding, too
        import traceback

        failure = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    for process in world.processes:
        for name, raised in process.notes.get("raised", ()):
            failure = failure or f"{process.name}/{name}: {type(raised).__name__}: {raised}"
    if seed % 20 == 0:
        gc.collect()
    return failure, world.scheduler.events, world.scheduler.trace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.shares")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--stop-at", type=int, default=10, help="end after so many failing seeds")
    parser.add_argument("--mutation", choices=sorted(SHARE_MUTATIONS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.mutation:
        from tests.simulation.mutations import install

        mutation: Mutation = SHARE_MUTATIONS[options.mutation]
        install(mutation)
    from tests.simulation.engine import clean_up

    try:
        if options.seed is not None:
            failure, events, lines = run_seed(options.seed, trace=True)
            print("\n".join(lines if options.trace else lines[-80:]))
            print(f"{events} events: {failure or 'all invariants hold'}")
            return int(bool(failure))
        begun, total, failures = time.perf_counter(), 0, []
        played = 0
        for seed in range(options.first, options.first + options.count):
            failure, events, _ = run_seed(seed)
            total, played = total + events, played + 1
            if failure:
                failures.append([seed, failure])
                if not options.json:
                    print(
                        f"seed {seed}: {failure[:1500]}\n  python -m tests.simulation.shares --seed {seed} --trace"
                    )
                if len(failures) >= options.stop_at:
                    break
        seconds = time.perf_counter() - begun
        if options.json:
            print(
                json.dumps({"schedules": played, "events": total, "seconds": seconds, "failures": failures})
            )
        else:
            print(f"{played} schedules, {total} events, {seconds:.1f} s, {len(failures)} failed")
        return int(bool(failures))
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
