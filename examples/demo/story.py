"""Runs the demo and checks its facts.

reference      the training, uninterrupted and without checkpoints: the result that must be matched bit for bit
until killed   the same training with checkpoints; every training rank gets SIGKILL in mid-run
fresh cluster  a new launcher that knows only the store's URL; it resumes and finishes
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from examples.demo.checks import (
    Check,
    check,
    damaged_archives,
    differences,
    losses_differ,
    open_without_holdfast,
)
from examples.demo.job import DemoError, Job, Step
from examples.demo.report import Display
from examples.demo.store import StoreWatch

__all__ = ["Outcome", "Plan", "play"]

_MARK = "this-folder-belongs-to-the-demo"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Plan:
    """Settings of a demo.

    Attributes:
        launcher: `mpirun` or `torchrun`.
        training: More arguments for the training script, such as the model's size.
        ring_bytes, chunk_bytes: Size of the ring, and of one chunk in it.
    """

    folder: Path
    ranks: int = 2
    steps: int = 150
    every: int = 10
    launcher: str = "mpirun"
    training: tuple[str, ...] = ()
    ring_bytes: int = 256 << 20
    chunk_bytes: int = 16 << 20

    @property
    def kill_after(self) -> int:
        """The step after which the ranks are killed: about the middle, and between two checkpoints."""
        return (self.steps * 11 // 20) // self.every * self.every + self.every // 2

    @property
    def store(self) -> Path:
        return self.folder / "store"


@dataclass
class Played:
    """Observations of one job."""

    steps: list[Step] = field(default_factory=list)
    events: Path | None = None

    @property
    def losses(self) -> dict[int, float]:
        return {step.step: step.loss for step in self.steps}


@dataclass
class Outcome:
    """All observations, for the report.

    Attributes:
        left: Processes and ring files that a job should not have left behind.
    """

    plan: Plan
    watch: StoreWatch
    reference: Played = field(default_factory=Played)
    killed: Played = field(default_factory=Played)
    resumed: Played = field(default_factory=Played)
    left: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def play(plan: Plan, display: Display) -> Outcome:
    """Run the demo in `plan.folder`, after removing an earlier demo's files from it.

    Raises:
        DemoError: The demo could not run to its end, for reasons unrelated to the facts.
    """
    _clear(plan.folder)
    outcome = Outcome(plan, StoreWatch(plan.store))
    with _runtime(plan) as runtime:
        _reference(outcome, display, runtime / "reference")
        _until_killed(outcome, display, runtime / "killed")
        display.say("checking what the killed run left in the store")
        outcome.checks += _store_checks(outcome, "after the kill")
        _fresh_cluster(outcome, display, runtime / "fresh")
    display.say("checking the result")
    outcome.checks += [_identical(plan), _same_losses(outcome), _went_on(outcome), _proven(outcome)]
    outcome.checks += _store_checks(outcome, "at the end")
    outcome.checks.append(check("no process and no ring is left", outcome.left))
    return outcome


def _reference(outcome: Outcome, display: Display, runtime: Path) -> None:
    plan = outcome.plan
    arguments = ["--every", "0", "--final", str(plan.folder / "reference.pt")]
    with (
        _job("reference", outcome, arguments, runtime, store=None) as job,
        display.phase("reference run", plan.steps) as bar,
    ):
        for step in job.follow():
            outcome.reference.steps.append(step)
            bar.at(step.step + 1, f"loss {step.loss:.3f}")
        job.succeed()
        _settle(job, outcome)


def _until_killed(outcome: Outcome, display: Display, runtime: Path) -> None:
    plan, watch = outcome.plan, outcome.watch
    arguments = ["--every", str(plan.every)]
    with (
        _job("killed", outcome, arguments, runtime, store=plan.store) as job,
        display.phase("until killed", plan.steps) as bar,
    ):
        outcome.killed.events = job.events
        killed: list[int] = []
        for step in job.follow(watch.look):
            outcome.killed.steps.append(step)
            bar.at(step.step + 1, f"loss {step.loss:.3f}")
            if step.step >= plan.kill_after and not killed:
                killed = job.kill_training_ranks()
                bar.at(step.step + 1, f"SIGKILL to {len(killed)} ranks")
        if len(killed) != plan.ranks:
            raise DemoError(
                f"killed {len(killed)} of {plan.ranks} training ranks; the job said:\n{job.output()}"
            )
        _settle(job, outcome)


def _fresh_cluster(outcome: Outcome, display: Display, runtime: Path) -> None:
    plan, watch = outcome.plan, outcome.watch
    arguments = ["--every", str(plan.every), "--final", str(plan.folder / "resumed.pt")]
    with (
        _job("fresh", outcome, arguments, runtime, store=plan.store) as job,
        display.phase("fresh cluster", plan.steps) as bar,
    ):
        outcome.resumed.events = job.events
        for step in job.follow(watch.look):
            outcome.resumed.steps.append(step)
            first = outcome.resumed.steps[0].step
            bar.at(step.step + 1, f"loss {step.loss:.3f}, from {first}")
        job.succeed()
        _settle(job, outcome)


def _job(name: str, outcome: Outcome, arguments: list[str], runtime: Path, *, store: Path | None) -> Job:
    plan = outcome.plan
    return Job(
        name,
        plan.folder,
        ranks=plan.ranks,
        arguments=["--steps", str(plan.steps), *plan.training, *arguments],
        store=store,
        runtime=runtime,
        launcher=plan.launcher,
        settings={"RING_BYTES": str(plan.ring_bytes), "CHUNK_BYTES": str(plan.chunk_bytes)},
    )


def _settle(job: Job, outcome: Outcome) -> None:
    """Let the job end by itself, as on a machine where nobody cleans up, and record what it leaves behind."""
    for process in job.settle(outcome.watch.look):
        try:
            outcome.left.append(f"{job.name}: process {process.pid} ({' '.join(process.cmdline())})")
        except psutil.Error:  # the process has just ended
            continue
    files = [path for path in job.runtime.rglob("*") if not path.is_dir()] if job.runtime.exists() else []
    outcome.left += [f"{job.name}: {path}" for path in files]


def _identical(plan: Plan) -> Check:
    reference = torch.load(plan.folder / "reference.pt", weights_only=True)
    resumed = torch.load(plan.folder / "resumed.pt", weights_only=True)
    claim = "final weights, optimizer and scheduler are bit-identical to the uninterrupted run's"
    return check(claim, list(differences(reference, resumed)))


def _same_losses(outcome: Outcome) -> Check:
    wrong = losses_differ(outcome.reference.losses, outcome.killed.losses)
    wrong += losses_differ(outcome.reference.losses, outcome.resumed.losses)
    return check("every step's loss is exactly the uninterrupted run's, before the kill and after it", wrong)


def _went_on(outcome: Outcome) -> Check:
    steps = [step.step for step in outcome.resumed.steps]
    wrong = []
    if not steps or steps != list(range(steps[0], outcome.plan.steps)):
        wrong.append(f"it ran steps {steps[:1]} to {steps[-1:]} of {outcome.plan.steps}")
    elif not 0 < steps[0] <= outcome.killed.steps[-1].step + 1:
        wrong.append(
            f"it began with step {steps[0]}; the kill came after step {outcome.killed.steps[-1].step}"
        )
    return check("the fresh cluster went on from a checkpoint and ran to the end", wrong)


def _proven(outcome: Outcome) -> Check:
    events = outcome.resumed.events
    lines = events.read_text(encoding="utf-8").splitlines() if events is not None and events.exists() else []
    said = [
        line
        for line in map(json.loads, lines)
        if line["event"] == "resume_proof" and line["role"] == "trainer"
    ]
    wrong = (
        [line["text"] for line in said if line["verdict"] != "verified resume"]
        if said
        else ["nothing was said"]
    )
    claim = "holdfast itself saw that the first step after the resume used what the run before had used"
    return check(claim, wrong)


def _store_checks(outcome: Outcome, when: str) -> list[Check]:
    watch = outcome.watch
    published = watch.published()
    files = list(published)
    none = [] if files else ["there is none"]
    unverified = [
        f"{file.name} is {manifest.state}"
        for file, manifest in published.items()
        if manifest.state != "verified"
    ]
    count = f"{len(files)} published files, {when}"
    return [
        check(
            f"each opens with torch.load(weights_only=True), and with mmap=True, without holdfast ({count})",
            none or open_without_holdfast(files),
        ),
        check(f"each passes python -m zipfile -t ({count})", none or damaged_archives(files)),
        check(f"each was read back and is verified ({count})", none or unverified),
        check(
            f"nothing partial is or was visible in the store, {when}",
            watch.partial + watch.strangers() + watch.unfinished(),
        ),
    ]


def _clear(folder: Path) -> None:
    """Make the folder, or empty it if an earlier demo made it; leave any other content alone."""
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).exists():
        raise DemoError(
            f"{folder} exists and is not from an earlier demo; give another one with --out, or remove it"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _MARK).touch()


@contextmanager
def _runtime(plan: Plan) -> Iterator[Path]:
    """Yield a directory for the rings: in shared memory if it has room, which a container's may not have."""
    room = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    if room:
        state = os.statvfs(_SHARED_MEMORY)
        room = state.f_bavail * state.f_frsize > 2 * plan.ring_bytes
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-", dir=_SHARED_MEMORY if room else None) as folder:
        yield Path(folder)
