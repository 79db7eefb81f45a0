"""`holdfast rank`: runs one rank, or torchrun, and ends with an exit code that an engine can act on."""

from __future__ import annotations

import click

from holdfast.command.examples import examples
from holdfast.command.output import print_stderr
from operator_side.commands.options import COMMAND, WRAPS_COMMAND, count, exit_codes
from operator_side.supervise.exit_codes import RETRY_EXIT_CODE, decide_exit_code
from operator_side.supervise.wrapped_rank import WrappedRank


@click.command(
    "rank",
    short_help="Run a rank or torchrun, and end with 75 if it is worth another start.",
    epilog=exit_codes(
        "0 done",
        "1 the script raised an exception of its own",
        "2-10 the class of the error, as for every command",
        "9 the job was lost more than --restarts-max times in a row without a newer checkpoint",
        "75 preempted, or processes of a job that had joined the stager were lost: start the job again",
        "130 ended by SIGINT",
        "137 memory ran out",
        "128+N ended by signal N, through its own fault",
        "other the exit code of the script",
    )
    + examples("holdfast rank -- torchrun --nproc-per-node 8 train.py", "holdfast rank -- python train.py"),
    context_settings=WRAPS_COMMAND,
)
@count(
    "--restarts-max",
    "Largest number of attempts of the job in a row without a newer checkpoint; after more of them the "
    "exit code is no longer 75.",
    8,
    least=0,
)
@COMMAND
def rank_command(command: tuple[str, ...], restarts_max: int) -> int:
    """Run COMMAND, which is one rank of a job or the torchrun of one machine, and tell a preemption from a bug.

    For engines that restart jobs themselves: Kubernetes, Slurm, SkyPilot, torchrun. The command forwards signals to
    COMMAND, so SIGTERM is a preemption notice if the setting `watch` names `sigterm`. It forwards SIGHUP as SIGTERM,
    unless SIGHUP is ignored at the start, as under nohup. It passes COMMAND's output through. When COMMAND has ended,
    one line on stderr says why, and the exit code says what to do.
    """
    outcome = WrappedRank(command).run()
    end = decide_exit_code(outcome, restarts_max=restarts_max)
    if end.code:
        what = ": start the job again" if end.code == RETRY_EXIT_CODE else ""
        print_stderr(f"holdfast rank: {end.message}; exit code {end.code}{what}")
    return end.code
