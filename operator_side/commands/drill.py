"""`holdfast drill`: kill a training script, and compare its checkpoints with those of an undisturbed run."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from holdfast.command.examples import examples
from holdfast.command.output import (
    console,
    format_seconds,
    json_option,
    print_json,
    print_line,
    print_stderr,
    table,
)
from holdfast.errors import ConfigError
from operator_side.commands import options as option
from operator_side.drill.drill_run import DrillSetup
from operator_side.drill.findings import KillFinding
from operator_side.drill.run_drill import DrillOutcome, check_folder, run_drill

_FAILED_EXIT_CODE = 1


@click.command(
    short_help="Kill your own script at random points, and check that it resumes exactly.",
    epilog=option.exit_codes("0 the drill passed", "1 the drill failed")
    + examples(
        "holdfast drill -n 2 --kills 3 -- python examples/train_gpt.py --steps 60 --every 5",
        "holdfast drill -n 2 --launcher torchrun -- python examples/train_gpt.py --steps 60 --every 5",
        "holdfast drill -n 2 --with notice --seed 7 --dir drilled -- python examples/train_gpt.py --steps 60 "
        "--every 5",
    ),
    context_settings=option.WRAPS_COMMAND,
)
@option.count("-n --ranks", "Number of training ranks; all run on this machine.", required=True)
@option.count("--kills", "How many times the job is killed.", 3)
@option.choice(
    "--with ways",
    ["notice", "none", "both", "wrapper"],
    "How the job is killed: after a preemption notice to a rank (SIGTERM), without a notice, or both in turn; "
    "wrapper: by SIGKILL of the process that started a rank, as when a container is killed.",
    "both",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the random choice of the processes that are killed, and of the steps after which it happens.",
)
@option.file(
    "--dir folder",
    "New or empty directory for both runs; it is kept. Default: a temporary one, kept if the drill fails.",
)
@option.number(
    "--notice-seconds",
    "Seconds from a preemption notice to the kill; the kill comes earlier if the checkpoint is staged earlier.",
    30.0,
    least=0.1,
)
@option.number("--seconds-max", "Seconds that the whole drill may take.", 1800.0, least=1)
@option.SETTINGS
@option.ULFM
@option.MPIRUN_OPTIONS
@option.choice(
    "--launcher",
    ["mpirun", "torchrun"],
    "Launcher of the ranks: `holdfast run`, which uses mpirun; or torchrun, beside a standing stager.",
    "mpirun",
)
@option.COMMAND
@json_option
def drill(as_json: bool, command: tuple[str, ...], folder: Path | None, **options: Any) -> None:
    """Run COMMAND twice under `holdfast run` or torchrun: once undisturbed, and once killed at random points and
    restarted. Then compare every checkpoint of the two runs.

    SIGKILL goes in turn to one rank, to all ranks, to all ranks and the stager, and to the launcher (mpirun or
    torchrun); or to one rank after a preemption notice. Give COMMAND few steps and frequent checkpoints: it needs one
    more checkpoint than kills. Each run has a store of its own, and no real store is touched; COMMAND's other writes
    happen.

    The drill passes if training resumes from the newest staged step each time, every later checkpoint equals that of
    the undisturbed run bit for bit, no sample is skipped or repeated (checked if the script uses ResumableSampler), and
    every notice leads to a checkpoint. If the two runs differ before the first kill, the script is not deterministic,
    and the drill says so.

    JSON: {"passed", "seed", "directory", "kills": [{"number", "what", "after_step", "last_step", "resumed_from",
    "lost_steps", "lost_seconds", "phases", "notice", "compared": [step], "unequal": [step], "exact", "wrong": [text]}],
    "files_compared", "files_differ", "constant": [name], "samples": null or {"trained", "skipped", "repeated"},
    "counters": [text], "measured": [name], "wrong": [text]}. `measured` names times, which are not compared.
    """
    given = folder is not None
    folder = folder or Path(tempfile.mkdtemp(prefix="holdfast-drill-"))
    folder = folder.absolute()
    check_folder(folder)
    _check(options)
    more = [] if options["ulfm"] else ["--no-ulfm"]
    more += ["--mpirun-options", options["mpirun_options"]] if options["mpirun_options"] else []
    setup = DrillSetup(
        command,
        options["ranks"],
        options["settings"],
        more,
        options["notice_seconds"],
        gives_notice=options["ways"] in ("notice", "both"),
        launcher=options["launcher"],
    )
    try:
        outcome = run_drill(
            setup,
            folder,
            kills=options["kills"],
            ways=options["ways"],
            seed=options["seed"],
            seconds_max=options["seconds_max"],
            report=lambda text: print_stderr(f"holdfast drill: {text}"),
        )
    except BaseException:
        print_stderr(f"holdfast drill: everything that the two runs wrote is in {folder}")
        raise
    kept = given or not outcome.passed
    if as_json:
        print_json(_document(outcome, options["seed"], str(folder) if kept else None))
    else:
        _print(outcome, options["seed"], str(folder) if kept else "")
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
    if not outcome.passed:
        click.get_current_context().exit(_FAILED_EXIT_CODE)


def _check(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    option.parse_settings(options["settings"])
    if options["launcher"] != "torchrun":
        return
    if options["ways"] == "wrapper":
        raise ConfigError(
            "--with wrapper --launcher torchrun: it is torchrun itself that starts each rank; give --with none, which "
            "kills it, too"
        )
    if options["mpirun_options"] or not options["ulfm"]:
        raise ConfigError(
            "--mpirun-options and --no-ulfm are for mpirun; leave them out with --launcher torchrun"
        )


def _document(outcome: DrillOutcome, seed: int, folder: str | None) -> dict[str, Any]:
    kills = []
    for finding in outcome.findings:
        fields, kill = dataclasses.asdict(finding), finding.kill
        del fields["kill"]
        planned = {"number": kill.number, "what": kill.description, "after_step": kill.after_step}
        kills.append({**planned, **fields, "exact": finding.exact})
    return {
        "passed": outcome.passed,
        "seed": seed,
        "directory": folder,
        "kills": kills,
        "files_compared": len(outcome.files),
        "files_differ": sum(bool(one.differs) for one in outcome.files),
        "constant": sorted(outcome.constant),
        "samples": None if outcome.samples is None else outcome.samples._asdict(),
        "counters": outcome.counters,
        "measured": sorted(outcome.measured),
        "wrong": outcome.wrong,
    }


def _print(outcome: DrillOutcome, seed: int, folder: str) -> None:
    rows = table("#", "KILLED", "AFTER", "RESUMED", "LOST", "ENDED", "STARTED", "RESTORED", "TRAINS", "EXACT")
    for finding in outcome.findings:
        rows.add_row(*_row(finding))
    console().print(rows)
    print_line(
        "LOST: steps that were done again, and the seconds they had taken. The other times follow each other: from the "
        "kill until no process was left (ENDED), until all had started (STARTED), until the state was restored "
        "(RESTORED), until the first step was done (TRAINS).",
        "dim",
    )
    for finding in outcome.findings:
        if finding.notice:
            print_line(f"kill {finding.kill.number}: notice: {finding.notice}")
    differing = sum(bool(one.differs) for one in outcome.files)
    print_line(f"files compared: {len(outcome.files)}, of which differ: {differing}")
    if outcome.constant:
        names = ", ".join(sorted(outcome.constant))
        print_line(
            f"these values differ between the two runs although no kill changed them (not seeded?): {names}"
        )
    if outcome.measured:
        print_line(f"not compared, since a clock has measured it: {', '.join(sorted(outcome.measured))}")
    found = "not checked, since the script does not use ResumableSampler"
    if (seen := outcome.samples) is not None:
        found = f"{seen.trained} trained on, {seen.skipped} skipped, {seen.repeated} repeated"
    print_line(f"samples: {found}")
    for counter in outcome.counters:
        print_line(
            f"{counter}: no state_dict() has it; register it as a buffer if training uses it", "yellow"
        )
    wrong = [f"kill {finding.kill.number}: {why}" for finding in outcome.findings for why in finding.wrong]
    for why in [*outcome.wrong, *wrong]:
        print_line(why, "red")
    where = f"; both runs are in {folder}" if folder else ""
    how, kills = f"failed (--seed {seed} repeats the same kills)", len(outcome.findings)
    if outcome.passed:
        how = f"passed: the run resumed bit for bit after each of {kills} kills (--seed {seed})"
    print_line(how + where)


def _row(finding: KillFinding) -> list[str]:
    phases = finding.phases
    resumed = finding.resumed_from
    started = sum(phases.get(name, 0.0) for name in ("launched_seconds", "joined_seconds"))
    exact = {True: "yes", False: "no", None: "not known"}[finding.exact]
    ended, restored, trained = (phases.get(f"{name}_seconds") for name in ("ended", "restored", "training"))
    times = (ended, started or None, restored, trained)
    return [
        str(finding.kill.number),
        finding.kill.description,
        f"step {finding.last_step}",
        "never" if resumed is None else "beginning" if resumed < 0 else f"step {resumed}",
        f"{finding.lost_steps} ({format_seconds(finding.lost_seconds)})",
        *("-" if one is None else format_seconds(one) for one in times),
        exact,
    ]
