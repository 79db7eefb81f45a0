"""`holdfast drill`: what becomes of a script when it is killed (operator_side/drill/)."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, plain, print_json, seconds, table

if TYPE_CHECKING:
    from operator_side.drill.findings import KillFinding
    from operator_side.drill.play import DrillOutcome


_FAILED_EXIT_CODE = 1


@click.command(
    short_help="Kill your own script at random points, and see that it goes on exactly.",
    epilog=examples(
        "holdfast drill -n 2 --kills 3 -- python examples/train_gpt.py --steps 60 --every 5",
        "holdfast drill -n 2 --with notice --seed 7 --dir drilled -- python examples/train_gpt.py --steps 60 --every 5",
    ),
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("-n", "--ranks", type=click.IntRange(1), required=True, help="Training ranks, on this machine.")
@click.option("--kills", type=click.IntRange(1), default=3, show_default=True, help="How often it is killed.")
@click.option(
    "--with",
    "ways",
    type=click.Choice(["notice", "none", "both"]),
    default="both",
    show_default=True,
    help="A rank is told first (SIGTERM); nobody is told; or in turn.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Draws who is killed, and after which step."
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="New or empty directory for both runs; kept. Default: a temporary one, kept if something did not hold.",
)
@click.option(
    "--notice-seconds",
    type=click.FloatRange(0.1),
    default=30.0,
    show_default=True,
    help="From a notice to the kill, unless the checkpoint is staged before.",
)
@click.option(
    "--seconds-max", type=click.FloatRange(1), default=1800.0, show_default=True, help="For all of it."
)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="As for `holdfast run`; repeatable."
)
@click.option("--ulfm/--no-ulfm", default=True, help="As for `holdfast run`.")
@click.option("--mpirun-options", default="", help="As for `holdfast run`.")
@click.argument("command", nargs=-1, required=True)
@json_option
def drill(as_json: bool, command: tuple[str, ...], folder: Path | None, **options: Any) -> None:
    """Run COMMAND twice under `holdfast run`: once undisturbed, once killed at random points and started again by
    itself. Then compare every checkpoint of both.

    What is killed in turn: one rank, all ranks, all and the stager, mpirun, by SIGKILL; or one rank after a notice.
    Give COMMAND few steps and frequent checkpoints: it needs one more checkpoint than kills. Both runs have stores of
    their own, and never touch a real one; what COMMAND writes elsewhere, it writes here too.

    What must hold: training goes on from the newest staged step; each later checkpoint is bit for bit that of the
    undisturbed run; no sample is skipped or repeated (seen where the script uses ResumableSampler); a notice is
    heard, and brings a checkpoint. Where the two runs differ before the first kill, the script is not deterministic,
    which is said.

    JSON: {"passed", "seed", "directory", "kills": [{"number", "what", "after_step", "last_step", "resumed_from",
    "lost_steps", "lost_seconds", "phases", "notice", "compared": [step], "unequal": [step], "exact", "wrong": [text]}],
    "files_compared", "files_differ", "constant": [name], "samples": null or {"trained", "skipped", "repeated"},
    "wrong": [text]}.

    Exit codes: 0 everything held; 1 something did not; else as every command.
    """
    from operator_side.drill.job import Setup
    from operator_side.drill.play import check_folder, play

    given = folder is not None
    folder = folder or Path(tempfile.mkdtemp(prefix="holdfast-drill-"))
    folder = folder.absolute()
    check_folder(folder)
    more = [word for pair in options["settings"] for word in ("--set", pair)]
    more += [] if options["ulfm"] else ["--no-ulfm"]
    more += ["--mpirun-options", options["mpirun_options"]] if options["mpirun_options"] else []
    setup = Setup(command, options["ranks"], more, options["notice_seconds"])
    try:
        outcome = play(
            setup,
            folder,
            kills=options["kills"],
            ways=options["ways"],
            seed=options["seed"],
            seconds_max=options["seconds_max"],
            say=lambda text: click.echo(plain(f"holdfast drill: {text}"), err=True),
        )
    except BaseException:
        click.echo(plain(f"holdfast drill: all that was written is in {folder}"), err=True)
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


def _document(outcome: DrillOutcome, seed: int, folder: str | None) -> dict[str, Any]:
    kills = []
    for finding in outcome.findings:
        fields = dataclasses.asdict(finding)
        kill = fields.pop("kill")
        kills.append(
            {
                "number": kill["number"],
                "what": finding.kill.what,
                "after_step": kill["after_step"],
                **fields,
                "exact": finding.exact,
            }
        )
    return {
        "passed": outcome.passed,
        "seed": seed,
        "directory": folder,
        "kills": kills,
        "files_compared": len(outcome.files),
        "files_differ": sum(bool(one.differs) for one in outcome.files),
        "constant": sorted(outcome.constant),
        "samples": None if outcome.samples is None else outcome.samples._asdict(),
        "wrong": outcome.wrong,
    }


def _print(outcome: DrillOutcome, seed: int, folder: str) -> None:
    out = console()
    rows = table("#", "KILLED", "AFTER", "RESUMED", "LOST", "ENDED", "STARTED", "RESTORED", "TRAINS", "EXACT")
    for finding in outcome.findings:
        rows.add_row(*_row(finding))
    out.print(rows)
    out.print(
        "LOST: steps done again, and the seconds they had taken. ENDED to TRAINS: seconds from the kill until no "
        "process was left, from then to the start of all, to the state, to the first step.",
        style="dim",
        soft_wrap=True,
    )
    for finding in outcome.findings:
        if finding.notice:
            out.print(
                plain(f"kill {finding.kill.number}: notice: {finding.notice}"), markup=False, soft_wrap=True
            )
    out.print(
        f"files compared: {len(outcome.files)}, different: {sum(bool(one.differs) for one in outcome.files)}"
    )
    if outcome.constant:
        names = ", ".join(sorted(outcome.constant))
        out.print(
            plain(
                f"another value in each run, and the same before and after each kill (never seeded?): {names}"
            ),
            markup=False,
            soft_wrap=True,
        )
    seen = outcome.samples
    out.print(
        "samples: not seen (the script does not use ResumableSampler)"
        if seen is None
        else f"samples: {seen.trained} trained on, {seen.skipped} skipped, {seen.repeated} repeated"
    )
    wrong = [f"kill {finding.kill.number}: {why}" for finding in outcome.findings for why in finding.wrong]
    for why in [*outcome.wrong, *wrong]:
        out.print(plain(why), style="red", markup=False, soft_wrap=True)
    where = f"; all of it is in {folder}" if folder else ""
    if outcome.passed:
        out.print(
            f"PASSED: {len(outcome.findings)} kills, and the run went on bit for bit (--seed {seed}){where}",
            soft_wrap=True,
            markup=False,
        )
    else:
        out.print(
            f"FAILED: not everything held (--seed {seed} draws the same kills again){where}",
            soft_wrap=True,
            markup=False,
        )


def _row(finding: KillFinding) -> list[str]:
    phases = finding.phases
    resumed = finding.resumed_from
    started = sum(phases.get(name, 0.0) for name in ("launched_seconds", "joined_seconds"))
    exact = {True: "yes", False: "NO", None: "not seen"}[finding.exact]
    times = [
        phases.get("ended_seconds"),
        started or None,
        phases.get("restored_seconds"),
        phases.get("training_seconds"),
    ]
    return [
        str(finding.kill.number),
        finding.kill.what,
        f"step {finding.last_step}",
        "never" if resumed is None else "the start" if resumed < 0 else f"step {resumed}",
        f"{finding.lost_steps} ({seconds(finding.lost_seconds)})",
        *("-" if one is None else seconds(one) for one in times),
        exact,
    ]
