"""`holdfast run`: run a training job under the supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import click

from holdfast.checkpoints.catalog import Catalog
from holdfast.command.examples import examples
from holdfast.command.output import print_stderr
from holdfast.config import StagerConfig, TrainerConfig
from holdfast.errors import ConfigError, FencedError, NotDurable, StoreError, StoreMissing, help_for
from holdfast.mpirun import Stagers, mpirun_command
from holdfast.notify.notifier import Notifier
from holdfast.notify.notify_options import destinations, notify_options
from holdfast.ring.directory import run_key, runtime_directory
from holdfast.store import open_store, require_parent
from holdfast.supervised import ATTEMPT_VARIABLE, SET_ASIDE_VARIABLE
from holdfast.telemetry.event_files import EVENTS_NAME, log_directory
from operator_side.cluster.fleet import load_fleet
from operator_side.commands import options as option
from operator_side.commands.run_with_torchrun import (
    check_options,
    print_multi_machine_commands,
    torchrun_job,
)
from operator_side.supervise.core import Core
from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from operator_side.supervise.hosts import Fleet, HostFile, LocalFleet, Slurm
from operator_side.supervise.job_processes import JobProcesses, RunFiles
from operator_side.supervise.kept_stager import KeptStager
from operator_side.supervise.limits import Limits
from operator_side.supervise.rank import STAGER, TRAINER
from operator_side.supervise.supervisor import FleetWatch, Supervisor, job_environment, next_attempt
from operator_side.supervise.supervisor_messages import Launch
from operator_side.supervise.verdict import INTERRUPTED, Cause, Verdict, error_class

_FORWARDED = ("HOLDFAST_", "NCCL_", "FI_", "OMP_", "PYTORCH_", "TORCH_")
# A path on this machine, which the stager gets as an argument; and secrets.
_NOT_FORWARDED = ("HOLDFAST_EVENTS", "HOLDFAST_NOTIFY")
_PAUSE_SECONDS_FIRST, _PAUSE_SECONDS_MAX = 2.0, 60.0


@click.command(
    short_help="Run a training job, and restart it after a preemption.",
    epilog=option.exit_codes(
        "0 the job is done, and its newest checkpoint is durable",
        "9 hosts or ranks were lost too often",
        "11 the job is done, but its newest checkpoint is not durable",
        "75 with --launcher torchrun: preempted, or processes were lost: start the job again",
        "130 ended by SIGTERM, Ctrl-C or SIGHUP (a closed terminal)",
        "137 a process was killed because memory ran out",
        "other the exit code of the process that crashed",
    )
    + examples(
        "holdfast run -n 8 --store s3://bucket/run -- python train.py",
        "holdfast run --launcher torchrun -n 2 --store /mnt/nfs/run -- python train.py",
        "holdfast run -n 16 --min-ranks 8 --hosts hosts --store /mnt/nfs/run -- python train.py",
        "holdfast run -n 8 --set keep_last=5 --set ring_bytes=8GiB --store s3://bucket/run -- python train.py",
    ),
    context_settings=option.WRAPS_COMMAND,
)
@option.count("-n --ranks", "Number of training ranks that are wanted.", required=True)
@option.count(
    "--min-ranks",
    "Smallest number of training ranks to start with where hosts are missing. Default: the value of --ranks.",
)
@option.count(
    "--stagers",
    "Number of stagers on this machine, each of which receives and writes a share of every checkpoint.",
    1,
)
@option.choice(
    "--launcher",
    ["mpirun", "torchrun"],
    "Launcher of the ranks. torchrun: on this machine alone, beside a stager of its own; torchrun restarts the "
    "ranks, and the command prints what several machines need.",
    "mpirun",
)
@click.option("--store", help="URL of the run: a path, s3://bucket/run, or another URL that fsspec knows.")
@option.flag(
    "--create",
    "Make the directories above the run's own, too. Without it a path whose parent directory does not exist is "
    "refused, because its file system may not be mounted.",
)
@option.file(
    "--hosts --hostfile",
    "File of hosts for training ranks, one `name slots=8` per line; read again every --poll-seconds.",
)
@option.flag("--slurm", "Run the training ranks on the hosts of this Slurm allocation.")
@option.file(
    "--cluster", "Run on the machines that `holdfast cluster up` started; the file given to its --from."
)
@click.option("--agent", help="Command that starts another command on a host, in place of ssh.")
@click.option(
    "--stager-host", help="Name by which the other hosts reach this machine. Default: its host name."
)
@option.ULFM
@option.MPIRUN_OPTIONS
@click.option(
    "--export",
    "exported",
    multiple=True,
    metavar="NAME",
    help="Environment variable to forward to the other hosts; repeatable.",
)
@option.SETTINGS
@option.file(
    "--logs",
    "Directory for status.jsonl, the event log and the output of each rank. Default: one for each run in "
    "~/.local/state/holdfast/runs.",
)
@option.count(
    "--crashes-max",
    "Give up after this many equal crashes in a row without a newer checkpoint. If they follow the restore of "
    "one checkpoint, that checkpoint is set aside first (--set-aside-max).",
    2,
)
@option.count(
    "--set-aside-max",
    "Largest number of checkpoints in a row to set aside because of equal crashes after the restore of each; the "
    "next attempt resumes from the checkpoint before. 0: none.",
    2,
    least=0,
)
@option.count(
    "--restarts-max",
    "Largest number of restarts in a row without a newer checkpoint; after that the command gives up. With --launcher "
    "torchrun: of all restarts, and 3 where it is not given.",
    8,
    least=0,
)
@option.number("--grace-seconds", "Seconds that the ranks have to end after they are told to.", 30.0)
@option.number(
    "--silent-seconds-max",
    "Seconds that a rank may stay silent after the stager has reported it; then the attempt is ended.",
    30.0,
)
@option.number(
    "--stall-seconds-max",
    "Seconds without a newly staged checkpoint, after which the attempt is ended. Default: no limit.",
)
@option.number("--hosts-seconds-max", "Seconds to wait until there are enough hosts.", 1800.0)
@notify_options
@option.number("--poll-seconds", "Seconds between two looks at the list of hosts.", 15.0, least=0.05)
@option.COMMAND
def run(command: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND as a training job with a stager, and restart it until it is done.

    Start the command on the stager's machine, which must not be a spot machine. When ranks or their hosts are lost, the
    job is restarted on the hosts that are left, and resumes from the newest checkpoint. The same crash --crashes-max
    times in a row without a newer checkpoint counts as a bug: the command then ends and shows the end of the log of the
    rank that crashed. If these crashes follow the restore of one checkpoint, the command sets that checkpoint aside
    first and resumes the job from the one before it, at most --set-aside-max times in a row.

    With --launcher torchrun COMMAND may be a program, a script (train.py) or a module (-m NAME). A stager that dies is
    restarted. SIGTERM and Ctrl-C are a preemption notice to the ranks, which then have --grace-seconds to end; a
    second signal kills them.
    """
    if options["min_ranks"] is not None and options["min_ranks"] > options["ranks"]:
        raise ConfigError(f"--min-ranks {options['min_ranks']} is more than --ranks {options['ranks']}")
    logging.getLogger("holdfast.run").setLevel(logging.INFO)
    if options["create"]:
        options["settings"] = (*options["settings"], "create=true")
    if options["launcher"] == "torchrun":
        return _run_torchrun(command, options)
    return _run_mpirun(command, options)


def _run_mpirun(command: Sequence[str], options: dict[str, Any]) -> int:
    config = _config(options)
    fleet = _fleet(options)
    logs = _logs(options["logs"], config.store)
    with _lock(logs), contextlib.closing(_notifier(options, config.store)) as notifier:
        events = config.events or logs / EVENTS_NAME
        given = {one.name: options[one.name] for one in dataclasses.fields(Limits) if one.name in options}
        core = Core(
            Limits(**given, ranks_min=options["min_ranks"] or options["ranks"]),
            _pause_seconds,
            first_attempt=next_attempt(logs),
            newest_step=_newest_step(config.store),
            now=time.monotonic(),
        )

        def final_check(verdict: Verdict) -> Verdict:
            is_done = verdict.cause is Cause.DONE
            return _check_durable(verdict, core.newest_step, config.store) if is_done else verdict

        shares = range(options["stagers"])
        rings = tuple(runtime_directory(config.store, config.runtime_dir, share=share) for share in shares)
        files = RunFiles(rings, logs, events)
        line = partial(_mpirun, command=command, config=config, events=events, options=options)
        job = JobProcesses(line, job_environment(), files, _relay)
        watch = FleetWatch(fleet, options["poll_seconds"])
        on_event = notifier.notify
        verdict = Supervisor(core, job, watch, files, final_check=final_check, on_event=on_event).run()
    return _exit_code(verdict, job, logs)


def _config(options: dict[str, Any]) -> StagerConfig:
    """Load the stager's settings. Raises `ConfigError`, also if the store's parent directory is missing."""
    config = StagerConfig.from_sources(store=options["store"], **option.parse_settings(options["settings"]))
    require_parent(config.store, create=config.create)
    return config


def _exit_code(verdict: Verdict, job: JobProcesses, logs: Path) -> int:
    """Return the exit code of this command; print why it is not 0."""
    error = error_class(verdict.exception)
    if verdict.exit_code:
        stopped = verdict.cause is Cause.STOPPED
        for line in [] if stopped else job.log_excerpt(verdict):
            print_stderr(line)
        print_stderr(f"holdfast run: {verdict.message}; logs: {logs}")
        if not stopped:
            print_stderr(f"help: {help_for(getattr(error, 'code', 'run'))}")
    # Python exits with 1 after any exception; holdfast's own classes have their own exit codes.
    return int(getattr(error, "exit_code", verdict.exit_code))


def _run_torchrun(command: Sequence[str], options: dict[str, Any]) -> int:
    check_options(option.parse_settings(options["settings"]))
    config = _config(options)
    logs = _logs(options["logs"], config.store)
    with _lock(logs), contextlib.closing(_notifier(options, config.store)) as notifier:
        events = config.events or logs / EVENTS_NAME
        print_multi_machine_commands(command, config.store, options)
        ring = runtime_directory(config.store, config.runtime_dir)
        arguments = _stager_arguments(config, events, options)
        stager = KeptStager(arguments, job_environment(), ring, _pause_seconds)
        newest_step = _newest_step(config.store)
        job = torchrun_job(
            command, stager, options, events=events, newest_step=newest_step, on_event=notifier.notify
        )
        code, message = job.run()
        if code == 0:
            done = Verdict(Cause.DONE, "the job is done", "done", exit_code=0)
            verdict = _check_durable(done, job.newest_step, config.store)
            code, message = verdict.exit_code, verdict.message
        causes = {0: Cause.DONE, RETRY_EXIT_CODE: Cause.STOPPED, INTERRUPTED: Cause.STOPPED}
        cause = causes.get(code, Cause.CRASHED)
        over = {"role": "supervisor", "event": "over", "cause": cause.value}
        notifier.notify({**over, "message": message or f"the job ended with exit code {code}"})
    if code and message:
        print_stderr(f"holdfast run: {message}; logs: {logs}")
    return code


def _notifier(options: dict[str, Any], store: str) -> Notifier:
    """Make the notifier for `--notify` and `--notify-command`."""
    return Notifier(destinations(options["notify"], options["notify_command"]), run=store)


def _fleet(options: dict[str, Any]) -> Fleet:
    chosen = [name for name in ("hosts", "slurm", "cluster") if options[name]]
    if len(chosen) > 1:
        raise ConfigError(
            f"--{chosen[0]} and --{chosen[1]}: expected one source of hosts; leave one of the two out"
        )
    agent = shlex.split(options["agent"]) if options["agent"] else None
    if options["hosts"]:
        return HostFile(options["hosts"], agent=agent)
    if options["slurm"]:
        return Slurm()
    if options["cluster"]:
        return load_fleet(options["cluster"])
    return LocalFleet()


def _logs(given: Path | None, store: str) -> Path:
    if given is None:
        given = log_directory(run_key(store))
    try:
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--logs {given}: this directory cannot be made: {error.strerror}; name another one"
        ) from error
    return given.absolute()


def _lock(logs: Path) -> IO[str]:
    # One supervisor per log directory, hence per run and machine. The kernel releases the lock when this process ends.
    file = (logs / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise FencedError(
            f"{logs}: process {owner} already supervises this run on this machine; end it first"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _newest_step(store: str) -> int:
    """Return the run's newest step; -1 in an empty run. An unreadable store is an error before anything starts."""
    opened = open_store(store)
    try:
        step = Catalog(opened).highest_good_step()
        return -1 if step is None else step
    except StoreMissing:
        return -1
    finally:
        opened.close()


def _check_durable(done: Verdict, step: int, store: str) -> Verdict:
    """Return `done`, or a verdict that `step`, the job's newest, is not durable."""
    try:
        durable = _newest_step(store)
    except StoreError as error:
        message = f"the job is done, and the store does not say whether step {step}, its newest, is durable: {error}"
    else:
        if durable >= step:
            return done
        kept = f"step {durable} is" if durable >= 0 else "nor is any other step"
        message = f"the job is done, and step {step}, its newest, is staged but not durable; {kept}"
    if TrainerConfig.from_sources().on_not_durable == "warn":
        return done
    name = f"{NotDurable.__module__}.{NotDurable.__qualname__}"
    return Verdict(Cause.LOST, message, "not durable", exit_code=NotDurable.exit_code, exception=name)


def _mpirun(
    launch: Launch, command: Sequence[str], config: StagerConfig, events: Path, options: dict[str, Any]
) -> list[str]:
    wrapper = [sys.executable, "-P", "-m", "operator_side.supervise.rank"]
    arguments = _stager_arguments(config, events, options)
    stager = [*wrapper, STAGER, sys.executable, "-P", "-m", "holdfast", "stager", *arguments]
    more = ["--output", "tag", *shlex.split(options["mpirun_options"])]
    if options["agent"]:
        more += ["--prtemca", "plm_ssh_agent", options["agent"]]
    hosts = None if launch.hosts is None else {host.name: host.slots for host in launch.hosts}
    if hosts is not None:
        names = {n for n in os.environ if n.startswith(_FORWARDED)} - set(_NOT_FORWARDED) | set(
            options["exported"]
        )
        given = {ATTEMPT_VARIABLE, *([SET_ASIDE_VARIABLE] if launch.set_aside else [])}
        for name in sorted(names & os.environ.keys() | given):
            more += ["-x", name]
    return mpirun_command(
        launch.ranks,
        [*wrapper, TRAINER, *command],
        stager=stager,
        stagers=Stagers(options["stagers"], options["stager_host"] or socket.gethostname()),
        ulfm=options["ulfm"],
        hosts=hosts,
        options=more,
    )


def _stager_arguments(config: StagerConfig, events: Path, options: dict[str, Any]) -> list[str]:
    settings = option.parse_settings(options["settings"])
    found: list[str] = []
    for name, value in {**settings, "store": config.store, "events": str(events)}.items():
        option_name = name.replace("_", "-")
        if name in {"verify", "linger", "reuse", "create"}:
            yes = value.lower() in {"1", "true", "yes", "on"}
            found.append(f"--{option_name}" if yes else f"--no-{option_name}")
        else:
            found += [f"--{option_name}", value]
    return found


def _pause_seconds(number: int) -> float:
    if number == 1:  # the attempt made progress, or was the first: restart at once
        return 0.0
    # Full jitter under a bound that doubles, as in holdfast/store/retrying.py.
    import tenacity

    wait = tenacity.wait_random_exponential(_PAUSE_SECONDS_FIRST, max=_PAUSE_SECONDS_MAX)
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = number - 1
    return float(wait(state))


def _relay(stream: str, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    with contextlib.suppress(OSError, ValueError):  # the reader is gone; the log files have the text
        out.write(text + "\n")
        out.flush()
