"""Runs a drill: the script once undisturbed and once with kills, then a comparison of the two runs.

The folder of a drill has `reference/` and `drilled/`, each with a store, logs and the output of the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import ConfigError, HoldfastError, PeerLost
from holdfast.store import open_store
from operator_side.drill.batches import advice_on_seeding, explain_different_batches
from operator_side.drill.compare import FileComparison, compare, constants
from operator_side.drill.drill_run import DrillRun, DrillSetup, sleep_briefly
from operator_side.drill.findings import (
    ExecutedKill,
    KillFinding,
    Samples,
    compare_counters,
    compare_samples,
    examine_kills,
    is_staged,
    shortened,
)
from operator_side.drill.kill_plan import GiveNotice, Kill, KillSequence, KillTarget, SendKill, plan_kills
from operator_side.drill.torchrun_run import TorchrunRun

PROGRESS_SECONDS = 10.0  # between two lines of progress
_NOTICE_ANSWERS = {"emergency_staged", "emergency_failed"}
_RUNS: Mapping[str, type[DrillRun]] = {"mpirun": DrillRun, "torchrun": TorchrunRun}


@dataclass
class DrillOutcome:
    planned: list[Kill]
    findings: list[KillFinding] = field(default_factory=list)
    files: list[FileComparison] = field(default_factory=list)
    # files from before the first kill that differ: the script itself is not deterministic
    before: list[FileComparison] = field(default_factory=list)
    # names of values that differ between the runs, but never change within a run
    constant: set[str] = field(default_factory=set)
    samples: Samples | None = None  # None: the script's samples were not recorded
    # Numbers on modules that are in no checkpoint, and that a resume did not bring back.
    counters: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    # Names of values that were not compared, because a clock measured them.
    measured: set[str] = field(default_factory=set)

    @property
    def passed(self) -> bool:
        return not self.wrong and not any(finding.wrong for finding in self.findings)


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` unless the folder is new or empty."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"--dir {folder}: expected a directory for the drill alone, got a file; name another one"
        )
    if folder.is_dir() and any(folder.iterdir()):
        what = "it is not empty"
        if any(folder.rglob("step-*.json")):
            what = "there are checkpoints in it: a drill never touches a run"
        raise ConfigError(f"--dir {folder}: {what}; name a directory that is new or empty")


def run_drill(
    setup: DrillSetup,
    folder: Path,
    *,
    kills: int,
    ways: str,
    seed: int,
    seconds_max: float,
    report: Callable[[str], None],
) -> DrillOutcome:
    """Run a drill in a new or empty `folder`. `ways`: `notice`, `none`, `both` or `wrapper`. `seconds_max`: for the
    whole drill. `report`: called with a line for each event. Raises `ConfigError`: the script fails by itself, or saves
    too seldom; `PeerLost`: the drill took too long, or the job did not answer.
    """
    check_folder(folder)
    deadline = time.monotonic() + seconds_max
    report("running the script undisturbed, as the reference")
    with _RUNS[setup.launcher](setup, folder / "reference", kills=0) as reference:
        progress = RunProgress("the undisturbed run", report, time.monotonic())
        ended = False
        while not ended:
            ended, new = reference.poll()
            progress.update(new["diary"], time.monotonic())
            sleep_briefly(deadline)
        if reference.exit_code:
            raise ConfigError(
                f"the script failed without any kill, with exit code {reference.exit_code}; fix it first. Its last "
                f"output:\n{reference.output_before_failure()}"
            )
    steps = [line["step"] for line in reference.lines["diary"] if "step" in line]
    if not steps:
        raise ConfigError(
            "the script never calls Checkpointer.step(), which tells a drill how far training is; call it after "
            "each step (docs/drill.md)"
        )
    saved = [item.step for item in Catalog(open_store(str(reference.store))).list() if not item.fault]
    outcome = DrillOutcome(plan_kills(seed, kills, ways, ranks=setup.ranks, checkpoints=saved))
    count = number_of_steps(steps)
    report(f"the reference did {count} steps and saved {len(saved)} checkpoints; now {kills} kills")
    with _RUNS[setup.launcher](setup, folder / "drilled", kills=kills) as drilled:
        executed = run_with_kills(
            drilled, outcome.planned, setup.notice_seconds, deadline, report, steps=count, comparable=saved
        )
    report("both runs have ended; comparing their checkpoints")
    if code := drilled.exit_code:
        outcome.wrong.append(f"the run with kills ended with exit code {code}: {drilled.output_tail(3)}")
    outcome.files = compare(open_store(str(reference.store)), open_store(str(drilled.store)))
    _judge(outcome, executed, reference, drilled)
    return outcome


def run_with_kills(
    run: DrillRun,
    kills: list[Kill],
    notice_seconds: float,
    deadline: float,
    report: Callable[[str], None],
    *,
    steps: int,
    comparable: Collection[int],
) -> list[ExecutedKill]:
    """Follow a run to its end and kill it as planned. Return the kills that were carried out, in order. `comparable`:
    as for `KillSequence`. Raises `PeerLost`: the drill took too long, or there was no process to kill.
    """
    sequence = KillSequence(kills, notice_seconds=notice_seconds, comparable=comparable)
    progress = RunProgress("the run with kills", report, time.monotonic(), steps=steps)
    executed: list[ExecutedKill] = []
    notice_at: float | None = None
    while True:
        ended, new = run.poll()
        progress.update(new["diary"], time.monotonic())
        _update_sequence(sequence, new)
        for line in new["status"]:
            if line.get("event") == "training":
                sequence.record_training()
                if executed:
                    report(str(line.get("message")))
        if ended:
            return executed
        match sequence.tick(time.time()):
            case GiveNotice(kill):
                notice_at = time.time()
                report(f"kill {kill.number}: notice (SIGTERM) to rank {kill.rank}")
                run.send_notice(kill)
            case SendKill(kill):
                at = time.time()
                report(f"kill {kill.number}: SIGKILL to {_describe_target(kill)}")
                if not run.kill(kill) and notice_at is None:
                    raise PeerLost(
                        f"kill {kill.number}: no process of {kill.description} was found on this machine"
                    )
                executed.append(ExecutedKill(kill, notice_at, at))
                notice_at = None
        sleep_briefly(deadline)


def _update_sequence(sequence: KillSequence, new: Mapping[str, list[dict[str, Any]]]) -> None:
    for line in new["diary"]:
        if "step" in line:
            sequence.record_step(int(line["step"]), line["time"], line["attempt"])
    for line in filter(is_staged, new["events"]):
        sequence.record_staged(int(line["step"]))
    if any(map(_is_notice_answer, new["events"])):
        sequence.record_answer()


def _describe_target(kill: Kill) -> str:
    if kill.notice:
        return f"rank {kill.rank}"
    return kill.description if kill.target is KillTarget.WRAPPER else kill.target.value


def _is_notice_answer(line: Mapping[str, Any]) -> bool:
    skipped = line.get("event") == "emergency" and line.get("choice") == "skip"
    return line.get("role") == "stager" and (skipped or line.get("event") in _NOTICE_ANSWERS)


def _judge(
    outcome: DrillOutcome, executed: list[ExecutedKill], reference: DrillRun, drilled: DrillRun
) -> None:
    first = executed[0].kill.after_step if executed else -1
    outcome.constant = constants(outcome.files, first)
    outcome.files = [
        one._replace(differs=tuple(each for each in one.differs if each.path not in outcome.constant))
        for one in outcome.files
    ]
    outcome.measured = {name for one in outcome.files for name in one.measured}
    outcome.before = [one for one in outcome.files if one.step <= first and one.differs]
    outcome.findings = examine_kills(
        executed,
        diary=drilled.lines["diary"],
        events=drilled.lines["events"],
        status=drilled.lines["status"],
        files=[one for one in outcome.files if one.step > first],
    )
    why = "no checkpoint was staged before the end of the run; give the script more steps"
    if any(map(is_staged, drilled.lines["events"])):
        why = "the run had already ended"
    for kill in outcome.planned[len(executed) :]:
        outcome.wrong.append(f"kill {kill.number} ({kill.description}) never came: {why}")
    if not outcome.before:
        explain_different_batches(
            outcome.findings, executed, reference.lines["diary"], drilled.lines["diary"]
        )
    for finding in outcome.findings:
        if finding.exact is None:
            finding.wrong.append(
                "no checkpoint after the kill could be compared, because the next kill or the end came before a step "
                "that the undisturbed run has saved; give the script more steps, or choose another --seed"
            )
    if outcome.before:
        one = outcome.before[0]
        outcome.wrong.append(
            f"two runs of this script differ before any kill, at step {one.step}: {shortened(one.differs)}. The "
            "script is not deterministic, so the drill cannot tell whether it resumes exactly. "
            f"{advice_on_seeding(reference.lines['diary'], drilled.lines['diary'])}"
        )
    outcome.samples = compare_samples(reference.lines["diary"], drilled.lines["diary"])
    outcome.counters = compare_counters(reference.lines["diary"], drilled.lines["diary"])
    if outcome.samples is not None and (outcome.samples.skipped or outcome.samples.repeated):
        outcome.wrong.append(
            f"samples: {outcome.samples.skipped} skipped, {outcome.samples.repeated} repeated"
        )
    for run in (reference, drilled):
        try:
            faults = [item.fault for item in Catalog(open_store(str(run.store))).list() if item.fault]
        except HoldfastError as error:
            faults = [str(error)]
        outcome.wrong += faults


def number_of_steps(steps: Collection[int]) -> int:
    """Return how many steps a run did, at least one. Lightning's callback skips numbers, such as at an epoch's end."""
    return max(steps) + (1 if min(steps) == 0 else 0)


class RunProgress:
    """Progress of one run. `now`: seconds of a monotonic clock. `steps`: of the whole run; 0: unknown."""

    def __init__(self, run: str, report: Callable[[str], None], now: float, *, steps: int = 0) -> None:
        self._run, self._report, self._steps = run, report, steps
        self._started_at = self._reported_at = now
        self._step = self._reported_step = -1

    def update(self, diary: Iterable[Mapping[str, Any]], now: float) -> None:
        """Process new lines of the diary; report the first step at once, then progress every ten seconds."""
        for line in diary:
            if "step" in line:
                self._step = int(line["step"])
        is_first = self._reported_step < 0 <= self._step
        if not is_first and now < self._reported_at + PROGRESS_SECONDS:
            return
        self._reported_at, self._reported_step = now, self._step
        of = f" of {self._steps}" if self._steps else ""
        where = f"step {self._step}{of} is done" if self._step >= 0 else "no step is done yet"
        self._report(f"{self._run}: {where}, {now - self._started_at:.0f} s after its start")
