"""A world with a standing stager that ranks reach over TCP: it outlives jobs, and connections are cut.

operator: starts the stager, and restarts it after its death     launcher: job after job, or one over the other
      │                                                                │
      ▼                                                                ▼
stager: the real StandingStager, JobListener, TcpTrainersPort ◄─ ranks: the real TcpStagerPort, Connector, PayloadSender
                             sockets of tcp_network.py, with their faults

faults of its own: a connection is cut, or half open; a stalled network; slow; refused; SIGTERM to the stager;
                   a job is restarted while the processes of its last start are frozen, and wake up late
"""

from __future__ import annotations

import functools
import os
import random
import signal
from dataclasses import dataclass, fields

from pydantic import SecretStr

from holdfast.checkpoints.catalog import CatalogListing
from holdfast.errors import HoldfastError
from holdfast.net.address import Address
from holdfast.net.handshake import MESSAGES_CHANNEL, JobStart
from stager.standing import StandingStager
from tests.simulation.runtime import SIM
from tests.simulation.scheduler import Process
from tests.simulation.store import pristine
from tests.simulation.tcp_checks import PlayedTcpPort, TcpChecks, start_of
from tests.simulation.tcp_network import Network
from tests.simulation.transport import Job
from tests.simulation.world import Fault, Plan, World
from trainer_side.link.rejoining import Reconnect
from trainer_side.ranks.connecting import Connector

__all__ = ["TcpJob", "TcpPlan", "TcpWorld"]

KEY = "k" * 32
PORT = 29411
_STARTS_MAX = 12  # of stagers in a row
_GIVE_UP_SECONDS = 150.0
_FAULTS = ("cut", "half", "hole", "slow", "refuse", "replace", "term stager")
_WEIGHTS = (6, 4, 4, 3, 2, 6, 2)


@dataclass
class TcpPlan(Plan):
    """The choices of a seed, with those for TCP alone."""

    connections: int = 1
    window_bytes: int = 1 << 16
    cut_share: float = 0.0  # of all calls of `send`: then the connection is cut
    launches: float = 0.5  # share of the jobs that another launcher starts

    @classmethod
    def over_tcp(cls, plan: Plan, seed: int) -> TcpPlan:
        """The same plan, with TCP faults added. It draws from its own dice, as `may_freeze` does."""
        chance = random.Random(f"tcp {seed}")
        made = cls(
            **{field.name: getattr(plan, field.name) for field in fields(plan)},
            connections=chance.choice([1, 1, 2]),
            window_bytes=chance.choice([1500, 6000, 1 << 16]),
            cut_share=chance.choice([0.0, 0.0, 0.01, 0.04]),
            launches=chance.choice([0.0, 0.5, 1.0]),
        )
        if chance.random() < 0.5:
            made.faults = []  # only connections break, which code above the ports must not notice
            made.full, made.fail_share, made.slow_seconds, made.slowest_message_seconds = "", 0.0, 0.0, 0.05
            made.pause_seconds = 0.0
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            what = chance.choices(_FAULTS, _WEIGHTS)[0]
            made.faults.append(Fault(what, at_event=int(2 ** chance.uniform(5, 10.5))))
        if any(fault.what == "replace" for fault in made.faults):
            made.jobs = max(2, made.jobs)
        return made


class TcpJob(Job):
    """The ranks of one start of a job.

    Attributes:
        launch: The launch that has started it. `incarnation`: names this start. `replaced`: restarted, dead or not.
    """

    def __init__(self, world: TcpWorld, number: int, launch: str) -> None:
        super().__init__(world, number, world.plan.ranks, ulfm=world.plan.ulfm)
        self.launch, self.incarnation = launch, number.to_bytes(16, "big")
        self.replaced = False


class TcpWorld(World):
    """The world of one seed, over TCP."""

    plan: TcpPlan

    def _make_plan(self) -> TcpPlan:
        return TcpPlan.over_tcp(super()._make_plan(), self.seed)

    def run(self) -> None:
        SIM.descriptors = {}
        self.network = Network(self)
        self.tcp_checks = TcpChecks(self)
        self.stager: Process | None = None
        self.stager_vanished = False
        self._stager_wanted = True
        self._stagers = 0
        self.stager_config = self.stager_config.model_copy(
            update={"listen": f"stager:{PORT}", "key": SecretStr(KEY)}
        )
        super().run()

    # -- who starts what -----------------------------------------------------------------------------------------

    def _launch(self) -> None:
        sim, plan = self.scheduler, self.plan
        operator = sim.process("world", "operator", self._operate)
        launch = "launch 0"
        for number in range(plan.jobs):
            if number and sim.chance.random() < plan.launches and not self._tcp_job(number - 1).replaced:
                launch = f"launch {number}"
            job = self._start_tcp_job(number, launch)
            sim.wait(lambda job=job: job.is_over() or job.replaced, None, "job")  # type: ignore[misc]
            if not job.replaced:
                sim.wait(None, sim.chance.choice([0.0, 1.0, 10.0, 100.0]), "between jobs")
        sim.wait(lambda: all(job.is_over() for job in self.jobs), None, "jobs")
        self._calm_down()
        self._stager_wanted = False
        if self.stager is not None:
            self._terminate(self.stager)
        sim.wait(operator.is_over, None, "operator")
        self._see_all_written()

    def _operate(self) -> None:
        """Keep a stager running."""
        sim = self.scheduler
        while self._stager_wanted and self._stagers < _STARTS_MAX:
            if self.intruder is not None and self._stagers:
                return  # none can start any more
            number, self._stagers = self._stagers, self._stagers + 1
            self.stager = stager = self._process("stager", f"stager {number}", self._standing_stager)
            self.stager_vanished = False
            stager.notes["job"] = self.jobs[-1] if self.jobs else None
            for job in self.jobs:
                job.stager = stager
            sim.wait(stager.is_over, None, "stager")
            self.stager_vanished = bool(stager.notes.get("vanished"))
            sim.wait(lambda: not self._stager_wanted, sim.chance.choice([0.0, 1.0, 8.0]), "before a stager")

    def _standing_stager(self) -> None:
        process = self.scheduler.here
        try:
            standing = StandingStager(self.stager_config)
            process.notes["listens"] = True
            standing.run()
        except HoldfastError as error:
            process.notes["ended_with"] = error

    def _terminate(self, process: Process) -> None:
        if process.kind == "stager" and signal.SIGTERM not in process.handlers:
            self._end_at_once(process, "by SIGTERM, in its start")
            return
        try:
            super()._terminate(process)
        except SystemExit:  # raised at any point of the process
            self._end_at_once(process, "by a second SIGTERM")
            return
        wakes = process.notes.get("wakeup_fd")
        if process.alive and wakes is not None:
            os.write(wakes, b"\x0f")

    def _end_at_once(self, process: Process, why: str) -> None:
        process.notes["struck"] = True
        self.scheduler.later(0.0, lambda: self.scheduler.kill(process, why))

    def _tcp_job(self, number: int) -> TcpJob:
        job = self.jobs[number]
        assert isinstance(job, TcpJob)
        return job

    def job_of(self, incarnation: bytes) -> TcpJob:
        """The job of this incarnation."""
        return self._tcp_job(int.from_bytes(incarnation, "big"))

    def order_of(self, number: int) -> int:
        """Order by joining: a start that was frozen and joins late restores the steps that the others have saved."""
        return self.tcp_checks.joined.index(number)

    def _start_tcp_job(self, number: int, launch: str) -> TcpJob:
        job = TcpJob(self, number, launch)
        first = self._begin_job(job)
        job.stager = self.stager
        for rank in range(job.ranks):
            process = self._process(
                "rank", f"rank {rank} of job {number}", functools.partial(self._rank, job, rank, first)
            )
            process.notes["job"] = job
            job.processes[rank] = process
        for process in job.processes.values():
            job.living += 1
            process.on_end.append(functools.partial(self._rank_ended, job))
        return job

    def _rank_port(self, job: Job, rank: int) -> PlayedTcpPort | None:
        process = self.scheduler.here
        try:
            return self._connect(job, rank, 0, 60.0)
        except HoldfastError as error:
            process.notes["problem"] = error
            process.notes["left"] = True
            return None

    def _again(self, job: Job, rank: int) -> Reconnect | None:
        def newest_attempt() -> int:
            names = CatalogListing(pristine(self.store)).manifests
            return names[0].order.attempt if names else 0

        seconds_max = self.trainer_config.reconnect_seconds_max
        return Reconnect(lambda number: self._connect(job, rank, number, seconds_max), newest_attempt)

    def _connect(self, job: Job, rank: int, generation: int, seconds_max: float) -> PlayedTcpPort:
        assert isinstance(job, TcpJob)
        connector = Connector(
            Address("stager", PORT),
            KEY.encode(),
            rank=rank,
            ranks=job.ranks,
            start=JobStart(job.launch, job.incarnation, generation),
            tls=None,
        )
        port = PlayedTcpPort(
            connector,
            connector.open(MESSAGES_CHANNEL, seconds_max=seconds_max),
            connections=self.plan.connections,
            reconnect_seconds_max=self.trainer_config.reconnect_seconds_max,
        )
        port.play(self.tcp_checks, (start_of(job.incarnation, generation), rank))
        self.scheduler.here.port = port
        return port

    def _rank_ended(self, job: TcpJob, dead: Process) -> None:
        """A rank has ended or was killed: its launcher, if any, ends the others."""
        job.living -= 1
        said_goodbye = dead.notes.get("left") or (dead.port is not None and dead.port.has_left)
        if said_goodbye and not dead.notes.get("struck") and dead.error is None:
            return
        sim, others = self.scheduler, list(job.processes.values())
        if dead.notes.get("vanished"):
            sim.later(140.0, lambda: self.checks.deadlines_held(job))
            sim.later(_GIVE_UP_SECONDS, lambda: self._kill_all(others, "the launcher gives up"))
        elif not job.ulfm:
            sim.later(sim.chance.random() * 0.3, lambda: self._kill_all(others, "the launcher ends the job"))

    # -- faults --------------------------------------------------------------------------------------------------

    def _kill_job(self, why: str) -> None:
        stager = self.stager if self.scheduler.chance.random() < 0.3 else None
        self._kill_all([stager, *self.jobs[-1].processes.values()], why)

    def _befall(self, fault: Fault) -> None:
        sim, chance = self.scheduler, self.scheduler.chance
        match fault.what:
            case "cut" | "half":
                living = self.network.living()
                if not living:
                    fault.done, fault.at_event = False, fault.at_event + 20
                    return
                end = chance.choice(living)
                sim.note(f"! {fault.what}: a connection of {end.owner.name}")
                if fault.what == "cut":
                    self.network.cut(end)
                elif chance.random() < 0.5:
                    self.network.half_open(end, chance.uniform(0.0, 15.0))
                else:
                    assert end.peer is not None
                    self.network.half_open(end.peer, chance.uniform(0.0, 5.0))
            case "hole" | "slow" | "refuse":
                ranks = [p for p in self.processes if p.kind == "rank" and p.alive]
                if not ranks:
                    fault.done, fault.at_event = False, fault.at_event + 20
                    return
                victim = chance.choice(ranks)
                seconds = chance.choice([1.0, 5.0, 8.0] if fault.what == "slow" else [1.0, 8.0, 12.0, 40.0])
                path = self.network.path(victim)
                sim.note(f"! {fault.what}: {victim.name} for {seconds:g} s")
                if fault.what == "hole":
                    self.network.hole(path, seconds)
                elif fault.what == "slow":
                    path.slow_until = sim.now + seconds
                else:
                    path.refusing_until = sim.now + seconds
            case "replace":
                self._replace(fault)
            case "term stager":
                if self.stager is not None and not self.stager.notes.get("terminated"):
                    self._terminate(self.stager)
            case _:
                super()._befall(fault)

    def _replace(self, fault: Fault) -> None:
        """The launcher restarts the job, in whatever state its processes are."""
        sim, chance = self.scheduler, self.scheduler.chance
        job = self._tcp_job(-1) if self.jobs else None
        if job is None or job.is_over() or job.number + 1 >= self.plan.jobs:
            fault.done = job is not None and job.number + 1 >= self.plan.jobs
            fault.at_event += 20
            return
        sim.note(f"! job {job.number} is started again")
        job.replaced = True
        for process in job.processes.values():
            if process.alive:
                process.notes["struck"] = True
                match chance.choice(["kill", "stop", "stop", "run"]):
                    case "kill":
                        sim.kill(process, "its agent is lost")
                    case "stop":
                        process.stopped_until = sim.now + chance.choice([0.2, 1.0, 15.0, 60.0])
                        sim.note(f"! {process.name} stands still until {process.stopped_until:.1f}")
