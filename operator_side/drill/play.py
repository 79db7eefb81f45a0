"""The drill as it is played: the script once undisturbed, once killed; then both are compared.

The folder is the drill's own. It has `reference/` and `drilled/`, each with a store, logs and what the job has said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import ConfigError, HoldfastError, PeerLost
from holdfast.store import open_store
from operator_side.drill.compare import Compared, compare, constants
from operator_side.drill.findings import KillFinding, Samples, Struck, examine, samples, shortened
from operator_side.drill.job import DrillRun, Setup, wait_until
from operator_side.drill.kill_plan import GiveNotice, Kill, Sequence, Strike, plan

_ANSWERS = {"emergency_staged", "emergency_failed"}


@dataclass
class DrillOutcome:
    """What came of it.

    Attributes:
        planned: The kills that were drawn.
        findings: Of each kill that came.
        files: Every file that was compared.
        before: Steps before the first kill that differ already: the script itself is not deterministic.
        constant: Names that differ between the runs, and never changed within either.
        samples: See there; None: not seen.
        wrong: What did not hold, of the whole.
    """

    planned: list[Kill]
    findings: list[KillFinding] = field(default_factory=list)
    files: list[Compared] = field(default_factory=list)
    before: list[Compared] = field(default_factory=list)
    constant: set[str] = field(default_factory=set)
    samples: Samples | None = None
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.wrong and not any(finding.wrong for finding in self.findings)


def check_folder(folder: Path) -> None:
    """A folder for a drill: a new or an empty one.

    Raises:
        ConfigError: Something is in it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"--dir {folder}: expected a directory for the drill alone, got a file; name another one"
        )
    if folder.is_dir() and any(folder.iterdir()):
        checkpoints = any(folder.rglob("step-*.json"))
        what = (
            "there are checkpoints in it: a drill never touches a run" if checkpoints else "it is not empty"
        )
        raise ConfigError(f"--dir {folder}: {what}; name a directory that is new or empty")


def play(
    setup: Setup,
    folder: Path,
    *,
    kills: int,
    ways: str,
    seed: int,
    seconds_max: float,
    say: Callable[[str], None],
) -> DrillOutcome:
    """Play it.

    Args:
        setup: What is run.
        folder: See `check_folder`.
        kills: How many.
        ways: `notice`, `none` or `both`.
        seed: See `plan`.
        seconds_max: For all of it.
        say: Told of each thing as it happens.

    Raises:
        ConfigError: The script cannot be drilled: it fails by itself, or saves too seldom.
        PeerLost: Its time was over, or the job did not answer.
    """
    check_folder(folder)
    deadline = time.monotonic() + seconds_max
    say("reference: the script, undisturbed")
    with DrillRun(setup, folder / "reference") as reference:
        while not reference.look()[0]:
            wait_until(deadline)
        _succeeded(reference, "undisturbed, under `holdfast run`, it")
    steps = [line["step"] for line in reference.said["diary"] if "step" in line]
    if not steps:
        raise ConfigError(
            "the script never calls Checkpointer.step(), by which a drill knows where training is; call it after "
            "each step (docs/drill.md)"
        )
    saved = [item.step for item in Catalog(open_store(str(reference.store))).list() if not item.fault]
    outcome = DrillOutcome(plan(seed, kills, ways, ranks=setup.ranks, checkpoints=saved))
    say(f"reference: {len(set(steps))} steps, {len(saved)} checkpoints; now {kills} kills")
    with DrillRun(setup, folder / "drilled") as drilled:
        struck = disturb(drilled, outcome.planned, setup.notice_seconds, deadline, say)
    if drilled.exit_code != 0:
        outcome.wrong.append(
            f"the killed run ended with exit code {drilled.exit_code}: {drilled.last_words(3)}"
        )
    outcome.files = compare(open_store(str(reference.store)), open_store(str(drilled.store)))
    _judge(outcome, struck, reference, drilled)
    return outcome


def _succeeded(run: DrillRun, who: str) -> None:
    if run.exit_code:
        raise ConfigError(f"{who} ended with exit code {run.exit_code}; it said:\n{run.last_words()}")


def disturb(
    run: DrillRun, kills: list[Kill], notice_seconds: float, deadline: float, say: Callable[[str], None]
) -> list[Struck]:
    """Follow a run to its end, and kill it as planned. What came, in order.

    Raises:
        PeerLost: The time was over, or there was nobody to kill.
    """
    sequence = Sequence(kills, notice_seconds=notice_seconds)
    struck: list[Struck] = []
    told_at: float | None = None
    while True:
        ended, new = run.look()
        for line in new["diary"]:
            if "step" in line:
                sequence.stepped(int(line["step"]), line["time"])
        for line in new["status"]:
            if line.get("event") == "training":
                sequence.trains()
                if struck:
                    say(str(line.get("message")))
        if any(_answers(line) for line in new["events"]):
            sequence.answered()
        if ended:
            return struck
        match sequence.tick(time.time()):
            case GiveNotice(kill):
                told_at = time.time()
                say(f"kill {kill.number}: notice (SIGTERM) to rank {kill.rank}")
                run.tell(kill)
            case Strike(kill):
                at = time.time()
                say(
                    f"kill {kill.number}: SIGKILL to {kill.target if not kill.notice else f'rank {kill.rank}'}"
                )
                if not run.strike(kill) and told_at is None:
                    raise PeerLost(f"drill: kill {kill.number}: {kill.what} was not found on this machine")
                struck.append(Struck(kill, told_at, at))
                told_at = None
        wait_until(deadline)


def _answers(line: Mapping[str, Any]) -> bool:
    if line.get("role") != "stager":
        return False
    skipped = line.get("event") == "emergency" and line.get("choice") == "skip"
    return skipped or line.get("event") in _ANSWERS


def _judge(outcome: DrillOutcome, struck: list[Struck], reference: DrillRun, drilled: DrillRun) -> None:
    first = struck[0].kill.after_step if struck else -1
    outcome.constant = constants(outcome.files, first)
    outcome.files = [
        one._replace(differs=tuple(each for each in one.differs if each.path not in outcome.constant))
        for one in outcome.files
    ]
    outcome.before = [one for one in outcome.files if one.step <= first and one.differs]
    outcome.findings = examine(
        struck,
        diary=drilled.said["diary"],
        events=drilled.said["events"],
        status=drilled.said["status"],
        files=[one for one in outcome.files if one.step > first],
    )
    for kill in outcome.planned[len(struck) :]:
        outcome.wrong.append(f"kill {kill.number} ({kill.what}) never came: the run had ended before")
    for finding in outcome.findings:
        if finding.exact is None:
            finding.wrong.append(
                "no file after it could be compared: the reference saved none of these steps"
            )
    if outcome.before:
        one = outcome.before[0]
        outcome.wrong.append(
            f"two runs of this script differ before any kill, at step {one.step}: {shortened(one.differs)}. It is not "
            "deterministic by itself, so nothing can be said of its resuming"
        )
    outcome.samples = samples(reference.said["diary"], drilled.said["diary"])
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
