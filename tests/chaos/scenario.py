"""One experiment: a real job, a kill at a named point, a relaunch, and checks of the result.

    Scenario(place, directory, reference).kill("rank:1", at="frame_sent", n=3).relaunch().check()

    kill      start the job; wait for the marker of the point (holdfast/faultpoint.py); SIGKILL the victims; let the
              survivors end by themselves
    relaunch  the same line again, on the same machine at once, or on another one after the flusher's end
    check     nothing staged was lost, nothing partial is listed, no orphan is left, and the training is the same
              bit for bit as an uninterrupted one

A victim that itself reaches the point kills itself there. If the victims are others, the reacher is stopped until they
are dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil

from holdfast.checkpoints.catalog import Catalog, CatalogItem
from holdfast.checkpoints.verification import verify_file
from holdfast.errors import StoreMissing
from holdfast.faultpoint import FIRED_VARIABLE, VARIABLE, parse_faults
from holdfast.image.proof_record import proof_name
from holdfast.ring.directory import runtime_directory
from holdfast.ring.ring import Ring
from holdfast.store import open_store
from holdfast.store.retrying import Retrying
from holdfast.wire.step_proof import ProofVerdict
from tests.chaos import job as training
from tests.chaos.cells import EVERY, RANKS, SAVES, STEPS
from tests.chaos.place import Place
from tests.support.cluster import assert_nothing_left, load, losses, same, wait_until
from tests.support.events import read_events
from tests.support.forked_job import ForkedJob
from tests.support.job import Job, environment
from tests.support.standing_stager import StandingProcess
from tests.support.torchrun import by_torchrun

__all__ = ["END_SECONDS_MAX", "Scenario", "uninterrupted"]

_REACH_SECONDS_MAX = 120.0  # start-up of three processes, with a margin of four
END_SECONDS_MAX = 120.0
_FLUSHER_SECONDS_MAX = 90.0
_STATE_KEYS = ("model", "optimizer", "scheduler", "data", "rng")


class Scenario:
    """Args:
    place: The store.
    directory: For logs, events, markers, and the ranks' output.
    ulfm: Whether mpirun is asked to survive a process's death.
    keep_last: As the setting; 0 keeps all.
    ring: Size of the ring, instead of the place's own.
    tcp: Whether torchrun starts the ranks, which reach a standing stager over TCP.
    reference: The directory of an uninterrupted run, as `uninterrupted` made it.
    """

    def __init__(
        self,
        place: Place,
        directory: Path,
        reference: Path,
        *,
        ulfm: bool = True,
        keep_last: int = 0,
        ring: str = "",
        tcp: bool = False,
    ) -> None:
        self._settings = (*place.settings, *(("--ring-bytes", ring) if ring else ()))
        self._place, self._directory, self._reference, self._ulfm = place, directory, reference, ulfm
        self._keep_last, self._tcp = keep_last, tcp
        self._stagers: list[StandingProcess] = []
        self._machines = [directory / "machine-1"]
        self._lost_machines: set[Path] = set()
        self._jobs = 0
        self._markers = directory / "markers"
        self._markers.mkdir()
        self.staged_at_kill: set[int] = set()
        self._promised: set[int] = set()  # steps that must survive every kill
        self._trained_until = 0  # by earlier jobs
        self._then, self._then_failed = "", False
        self._torn = ""  # the file that is published torn

    # -- called by tests -----------------------------------------------------------------------------------------

    def after(self, saves: int) -> Scenario:
        """Begin with a store that has the first `saves` checkpoints of an earlier job."""
        steps = SAVES[:saves]
        store = self._reference / "store"
        self._place.put([store / f"step-{step:09d}.{end}" for step in steps for end in ("pt", "json")])
        self._promised = set(steps)
        self._trained_until = steps[-1] + 1
        return self

    def kill(
        self,
        *victims: str,
        at: str,
        n: int = 1,
        machine: bool = False,
        then: str = "",
        staged: int = 0,
        durable: int = 0,
        torn: int = -1,
        doubted: int = -1,
        first_chunks: int = 0,
        gone: int = 0,
        mend: Callable[[], None] = lambda: None,
    ) -> Scenario:
        """Train until `at`, kill the victims there, and wait until all survivors have ended.

        Args:
            victims: `rank:N`, `stager`, `flusher`, `mpirun`. None: the reacher is stopped while the others train on,
                and wakes.
            at: A point of the first victim, `frame_sent`, or of another process, `flusher@part_written`.
            n: Which time.
            machine: The memory of the machine is lost with them, and with it all steps that were only staged.
            then: Another fault, armed for the successor of a dead process: `flusher@recovering=kill`.
            staged: How many saves are staged at that point although no event may say so yet, and `durable`.
            torn: Rank 0 finds its copy of this step torn when the point is reached; -1: none.
            doubted: Rank 0 has published this step torn, and its doubt is on the way at the point; -1: none.
            gone: How many staged saves have been dropped from the ring for newer ones.
            mend: Called when the victims are dead.
            first_chunks: Initial slots of a ring that grows; the job continues, and fills added slots. 0: do not wait.
        """
        self._then = then
        who, _, point = at.rpartition("@")
        who = who or victims[0]
        alone = victims == (who,)
        fault = f"{who}@{point}#{n}={'kill' if alone else 'stop'}"
        marker = self._markers / fault.partition("=")[0]
        tears = {"CHAOS_TORN": f"{torn}:{marker}"} if torn >= 0 else {}
        if doubted >= 0:
            tears["CHAOS_DOUBTED"] = str(doubted)
            self._torn = f"step-{doubted:09d}.pt"
        with self._start(fault + (f", {then}" if then else ""), **tears) as job:
            number = self._jobs
            stands = self._wait_for(job, marker)
            self.staged_at_kill = self._events("staged", "stager")
            if not alone:
                _wait_until_stopped(stands)
                if not victims:
                    self._wait_for_training(job)
                for pid in [self._pid(victim, job, number) for victim in victims]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stands, signal.SIGCONT)
            mend()
            if machine:
                self._lose_machine()
            if first_chunks:
                self._wait_for_added_slots(job, first_chunks)
            job.wait(END_SECONDS_MAX)
            self._wait_for_stager()
        all_staged = self._events("staged", "stager") | set(SAVES[:staged])
        all_durable = self._events("durable", "flusher") | set(SAVES[:durable])
        assert doubted in {-1, *self._doubts()}, f"nobody doubts step {doubted}:\n{self._all_said()}"
        self._promised = all_durable if machine else all_staged - set(SAVES[:gone])
        # mpirun's death ends the stager at any moment, even between a checkpoint's journal entry and its event.
        untold = SAVES[len(all_staged) : len(all_staged) + 1] if "mpirun" in victims and not self._tcp else ()
        self._check_listed(all_staged | set(untold))
        if torn >= 0:
            assert torn not in all_staged | all_durable, (
                f"step {torn} was torn, and staged:\n{self._all_said()}"
            )
        return self

    def check_torn(self, step: int) -> None:
        """Check that the copy of this step was torn, and that the survivors withdrew the step by that name."""
        assert (self._out(1) / "torn-0").exists(), "nothing was torn"
        assert f"gives up step {step}: torn: " in self._all_said()
        declined = [
            said
            for said in read_events(self._event_log(1))
            if said["role"] == "stager" and said["event"] in {"declined", "failed"} and said["step"] == step
        ]
        assert [said.get("cause") for said in declined] == ["torn"], declined

    def relaunch(self, *, elsewhere: bool = False) -> Scenario:
        """Start the same job again and let it end: on this machine at once, or `elsewhere` after the flusher's end."""
        if elsewhere:
            self._wait_for_flusher(self._machines[-1])
        if elsewhere or self._machines[-1] in self._lost_machines:
            self._machines.append(self._directory / f"machine-{len(self._machines) + 1}")
        with self._start(self._then) as job:
            if not self._then:
                job.succeed(END_SECONDS_MAX)
                self._wait_for_stager()
            elif (
                job.wait(END_SECONDS_MAX) != 0
            ):  # its flusher died before it was ready: reported, and restarted
                self._then_failed = True
        if self._then_failed:
            with self._start("") as job:
                job.succeed(END_SECONDS_MAX)
        for fault in parse_faults(self._then):
            assert (self._markers / fault.name).exists(), (
                f"{fault.name} was never reached:\n{self._all_said()}"
            )
        return self

    def check(self) -> None:
        """Check processes, leftovers, training, proofs and store after the relaunched job."""
        for machine in self._machines:
            if machine not in self._lost_machines:
                self._wait_for_flusher(machine)
                if machine is not self._machines[-1]:
                    _remove_lists(machine)
                assert_nothing_left(machine)
        self._check_training()
        self.check_proofs()
        # Saves made durable after the kill count as well: retention keeps the newest of all.
        later = self._events("staged", "stager", self._jobs) | self._events("durable", "flusher")
        must = sorted(self._promised | later)
        self._check_store(set(must[-self._keep_last :]))

    def check_proofs(self) -> None:
        """Check that each resumed job has trained as the one before, and that no proof differs."""
        for number in range(1, self._jobs + 1):
            said = [one for one in read_events(self._event_log(number)) if one["event"] == "resume_proof"]
            verdicts = {one["verdict"] for one in said}
            assert verdicts <= {ProofVerdict.VERIFIED, ProofVerdict.NOT_PROVEN}, (
                f"{said}:\n{self._all_said()}"
            )

    def close(self) -> None:
        """Kill all processes of a failed scenario, stopped ones too."""
        for machine in self._machines:
            for pid in _living(machine):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # -- the job -------------------------------------------------------------------------------------------------

    def _start(self, faults: str, **more: str) -> Job:
        self._jobs += 1
        out = self._out(self._jobs)
        env = {**self._place.env, **more, FIRED_VARIABLE: str(self._markers)}
        # The state is small, and must be copied behind the gate.
        env.setdefault("HOLDFAST_COPY_INSIDE_MS_MAX", "0")
        env["HOLDFAST_EVENTS"] = str(self._event_log(self._jobs))
        if faults:
            env[VARIABLE] = faults
        trainer = [training.__file__, str(out), str(STEPS), str(EVERY)]
        settings = (*self._settings, "--keep-last", str(self._keep_last))
        env = environment(self._machines[-1], **env)
        log = self._directory / f"job-{self._jobs}.log"
        if not self._tcp:
            stager = ["--store", self._place.url, *settings]
            return Job(RANKS, trainer, stager, env=env, log=log, ulfm=self._ulfm)
        alone = (*settings, "--once", "--reconnect-seconds-max", "1")
        self._stagers = self._standing(env, log, alone)
        env |= {"HOLDFAST_STAGER": ",".join(stager.address for stager in self._stagers)}
        return Job(RANKS, trainer, None, env=env, log=log, rewrite=by_torchrun(RANKS))

    def _standing(
        self, env: Mapping[str, str], log: Path, settings: tuple[str, ...]
    ) -> list[StandingProcess]:
        return [StandingProcess(self._place.url, env, log.with_suffix(".stager.log"), settings)]

    def _wait_for_stager(self) -> None:
        """Wait for standing stagers, which end after their job."""
        for stager in self._stagers:
            stager.process.wait(END_SECONDS_MAX)
        self._stagers = []

    def _out(self, number: int) -> Path:
        return self._directory / f"out-{number}"

    def _event_log(self, number: int) -> Path:
        return self._directory / f"events-{number}.jsonl"

    def _events(self, event: str, role: str, number: int | None = None) -> set[int]:
        """The steps with an event of this kind, in the logs of all jobs so far or of one."""
        found = set()
        for job in range(1, self._jobs + 1) if number is None else (number,):
            for said in read_events(self._event_log(job)):
                if said["event"] == event and said["role"] == role:
                    found.add(int(said["step"]))
        return found

    def _doubts(self) -> set[int]:
        """The steps of the first job whose doubts have reached the stager so far."""
        found: set[int] = set()
        for said in read_events(self._event_log(1)):
            if said["event"] == "doubt" and said["role"] == "stager" and said["steps"]:
                first, last = said["steps"]
                found.update(range(first, last + 1))
        return found

    def _wait_for(self, job: Job, marker: Path) -> int:
        """Wait until the point is reached; return the pid of the process that reached it."""

        def reached() -> bool:
            ended = job.process.poll() is not None  # before the look: its last act may be the marker
            if marker.exists() and marker.read_text().endswith("\n"):
                return True
            assert not ended, f"{marker.name} was never reached:\n{self._said(job)}"
            return False

        wait_until(reached, _REACH_SECONDS_MAX, lambda: f"{marker.name} was not reached:\n{self._said(job)}")
        return int(marker.read_text())

    def _wait_for_training(self, job: Job) -> None:
        """Wait until the ranks have done all steps before the next save."""
        written = [self._out(self._jobs) / f"losses-{rank}" for rank in range(RANKS)]

        def trained() -> bool:
            assert job.process.poll() is None, self._said(job)
            return all(SAVES[1] - 1 in losses(path) for path in written)

        wait_until(
            trained, _REACH_SECONDS_MAX, lambda: f"the ranks wait for who stands still:\n{self._said(job)}"
        )

    def _wait_for_added_slots(self, job: Job, first_chunks: int) -> None:
        """Wait until a save has filled added slots, which are filled first unless a save has all its slots."""
        with Ring.attach(runtime_directory(self._place.url, self._machines[-1])) as ring:

            def used() -> bool:
                # Check for the job's end first: the ring stays readable after it.
                ended = job.process.poll() is not None
                ring.refresh_slots()
                found = any(record.slot >= first_chunks for record in ring.remains())
                assert found or not ended, (
                    f"of {ring.ring_chunks} slots those from {first_chunks} on were of no use:\n{self._said(job)}"
                )
                return found

            wait_until(
                used, END_SECONDS_MAX, lambda: f"no save is in the slots that were added:\n{self._said(job)}"
            )

    def _pid(self, victim: str, job: Job, number: int) -> int:
        if victim == "mpirun":
            return job.process.pid
        if victim.startswith("rank:"):
            return int((self._out(number) / f"pid-{victim.partition(':')[2]}").read_text())
        if victim == "flusher":
            directory = runtime_directory(self._place.url, self._machines[-1])
            return int((directory / "flusher.pid").read_text())
        assert victim == "stager", victim
        if self._stagers:
            return self._stagers[0].process.pid
        children = psutil.Process(job.process.pid).children(recursive=True)
        (pid,) = [child.pid for child in children if "stager" in child.cmdline()]
        return pid

    def _said(self, job: Job) -> str:
        logs = sorted(self._directory.glob("machine-*-logs/**/*.log"))
        return "\n".join([job.output(), *(f"{log.name}:\n{log.read_text()}" for log in logs)])

    def _lose_machine(self) -> None:
        machine = self._machines[-1]
        self._lost_machines.add(machine)
        wait_until(lambda: not _living(machine), 30, f"not dead: {machine}")
        shutil.rmtree(machine)

    def _wait_for_flusher(self, machine: Path) -> None:
        directory = runtime_directory(self._place.url, machine)
        wait_until(lambda: not directory.exists(), _FLUSHER_SECONDS_MAX, f"{directory} is still there")

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_listed(self, allowed: Iterable[int]) -> None:
        """Right after the kill, while others may still be working: every listed step was staged, and is whole."""
        with contextlib.closing(cast(Retrying, open_store(self._place.url))) as store:
            for item in Catalog(store).list():
                assert item.step in allowed, f"{item.name} is listed, staged were only {sorted(allowed)}"
                try:
                    _verify(store, item)
                except (StoreMissing, AssertionError):
                    # A living flusher may be removing it: it removes the manifest first, so that must be gone by now.
                    if item.name in {info.name for info in store.list()}:
                        raise

    def _check_training(self) -> None:
        starts = set()
        for rank in range(RANKS):
            final = load(self._out(self._jobs) / f"final-{rank}.pt")
            starts.add(final["start"])
            expected = load(self._reference / "out" / f"final-{rank}.pt")
            assert same({**final, "start": 0}, expected), (
                "the final state differs from the uninterrupted run's"
            )
            took: dict[int, Any] = {}
            want = losses(self._reference / "out" / f"losses-{rank}")
            for number in range(1, self._jobs + 1):
                written = self._out(number) / f"losses-{rank}"
                last = losses(written) if written.exists() else {}
                took |= last
            assert set(last) == set(range(final["start"], STEPS)), "the relaunched run took other steps"
            want = {step: line for step, line in want.items() if step >= self._trained_until}
            assert took == want, "losses or samples differ from the uninterrupted run's"
        (start,) = starts
        newest = max(self._promised - self._doubts(), default=-1)
        assert start > newest, (
            f"resumed at step {start} although step {newest} was staged:\n{self._all_said()}"
        )
        assert start == 0 or start - 1 in SAVES

    def _check_store(self, must: set[int]) -> None:
        fetched = self._directory / "fetched"
        fetched.mkdir()
        with contextlib.closing(cast(Retrying, open_store(self._place.url))) as store:
            items = list(Catalog(store).list())
            for item in items:
                _verify(store, item)
        steps = {item.step for item in items}
        assert must <= steps, f"staged and lost: {sorted(must - steps)}:\n{self._all_said()}"
        doubtful = {item.name for item in items if item.manifest is not None and item.manifest.doubt}
        expected = {f"step-{step:09d}.json" for step in self._doubts()} & {item.name for item in items}
        assert doubtful == expected, f"doubtful are {doubtful}, not {expected}:\n{self._all_said()}"
        files = {item.manifest.file for item in items if item.manifest is not None}
        for file in sorted(files):
            state = load(self._place.fetch(file, fetched))
            reference = load(self._reference / "store" / f"{file[:14]}.pt")
            assert list(state) == list(_STATE_KEYS)
            assert same(state, reference) != (file == self._torn), f"{file} is not what was to be saved"
            truth = self._reference / "out" / f"truth-{int(file[5:14])}.pt"
            if truth.exists():
                whole = load(truth)
                assert same({name: state[name] for name in whole}, whole), f"{file} is not what torch gathers"
        names = files | {item.name for item in items}
        objects = self._place.objects()
        claims = {name for name in objects if name.startswith(".holdfast/writer-")}
        proofs = {proof_name(file) for file in files}  # of existing checkpoints
        left = objects - claims
        assert names <= left <= names | proofs, "something partial or forgotten is in the store"
        assert not self._place.open_uploads()

    def _all_said(self) -> str:
        logs = sorted([*self._directory.glob("*.log"), *self._directory.glob("machine-*-logs/**/*.log")])
        return "\n".join(f"--- {log.name}:\n{log.read_text(errors='replace')}" for log in logs)


def uninterrupted(settings: Sequence[str], size: Mapping[str, str], directory: Path) -> None:
    """Run the same training without a kill: the reference for scenarios."""
    with ForkedJob(
        RANKS,
        [training.__file__, str(directory / "out"), str(STEPS), str(EVERY)],
        ["--store", str(directory / "store"), *settings, "--keep-last", "0"],
        env=environment(directory / "machine", **size),
        log=directory / "job.log",
    ) as job:
        job.succeed(END_SECONDS_MAX)


def _verify(store: Retrying, item: CatalogItem) -> None:
    assert item.manifest is not None, item.fault
    assert not item.fault, item.fault
    report = verify_file(store, item.manifest)
    assert report.ok, report.summary()


def _wait_until_stopped(pid: int) -> None:
    process = psutil.Process(pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 30, f"process {pid} does not stand still")


def _remove_lists(machine: Path) -> None:
    """Remove the list of a killed stager, as its successor on this machine would have done; its segments are gone."""
    for path in machine.glob("mpi-segments-*"):
        assert not [name for name in json.loads(path.read_text()) if Path(name).exists()]
        path.unlink()


def _living(machine: Path) -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOLDFAST_RUNTIME_DIR") == str(machine):
                found.append(process.pid)
    return found
