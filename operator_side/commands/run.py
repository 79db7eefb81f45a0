"""`holdfast run`: the supervised job (operator_side/supervise/)."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from holdfast.command.examples import examples
from holdfast.errors import ConfigError, FencedError, StoreMissing, help_for

if TYPE_CHECKING:
    from holdfast.config import StagerConfig
    from operator_side.supervise.hosts import Fleet
    from operator_side.supervise.supervisor_messages import Launch


_FORWARDED = ("HOLDFAST_", "NCCL_", "FI_", "OMP_", "PYTORCH_", "TORCH_")
_NOT_FORWARDED = ("HOLDFAST_EVENTS",)  # a path of this machine; the stager is told by an argument
_PAUSE_SECONDS_FIRST, _PAUSE_SECONDS_MAX = 2.0, 60.0


@click.command(
    short_help="Run a training job, and start it again after a preemption.",
    epilog=examples(
        "holdfast run -n 8 --store s3://bucket/run -- python train.py",
        "holdfast run -n 16 --min-ranks 8 --hosts hosts --store /mnt/nfs/run -- python train.py",
        "holdfast run -n 8 --set keep_last=5 --set ring_bytes=8GiB --store s3://bucket/run -- python train.py",
    ),
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("-n", "--ranks", type=click.IntRange(1), required=True, help="Training ranks that are wanted.")
@click.option(
    "--min-ranks", type=click.IntRange(1), help="Start with so few if there are no more. Default: --ranks."
)
@click.option("--store", help="URL of the run: a path, or s3://bucket/run.")
@click.option(
    "--hosts", "--hostfile", type=click.Path(path_type=Path), help="File of hosts, `name slots=8` each."
)
@click.option("--slurm", is_flag=True, help="Run on the hosts of this Slurm allocation.")
@click.option(
    "--cluster", type=click.Path(path_type=Path), help="Run on what `holdfast cluster up` raised: its file."
)
@click.option("--agent", help="What starts a command on another host, as ssh does.")
@click.option("--stager-host", help="Name of this machine for the other hosts. Default: its host name.")
@click.option("--ulfm/--no-ulfm", default=True, help="Ask MPI to survive a rank's death.")
@click.option("--mpirun-options", default="", help='More options for mpirun, such as "--mca btl tcp,self".')
@click.option(
    "--export",
    "exported",
    multiple=True,
    metavar="NAME",
    help="Variable to hand on to other hosts; repeatable.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Setting of the stager; repeatable."
)
@click.option(
    "--logs",
    type=click.Path(path_type=Path),
    help="Directory for status.jsonl, events and the ranks' output.",
)
@click.option(
    "--crashes-max",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Equal crashes in a row without progress.",
)
@click.option(
    "--restarts-max",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    help="Relaunches in a row without progress.",
)
@click.option(
    "--grace-seconds",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="For the ranks to end when told to.",
)
@click.option(
    "--silent-seconds-max",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="For a rank that the stager no longer hears.",
)
@click.option(
    "--stall-seconds-max", type=click.FloatRange(0), help="End an attempt that stages no step for so long."
)
@click.option(
    "--hosts-seconds-max",
    type=click.FloatRange(0),
    default=1800.0,
    show_default=True,
    help="To wait for enough hosts.",
)
@click.option(
    "--poll-seconds",
    type=click.FloatRange(0.05),
    default=15.0,
    show_default=True,
    help="How often hosts are looked at.",
)
@click.argument("command", nargs=-1, required=True)
def run(command: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND as a training job with a stager beside it, until it is done.

    Start it on the stager's machine, which is not taken away. When ranks or their hosts are lost the job is started
    again on the hosts that are there, and goes on from the newest checkpoint. The same crash twice in a row without a
    newer checkpoint is a bug: then it stops, and shows the end of that rank's log.

    Exit codes: 0 the job is done; else that of the process that crashed; 9 hosts or ranks were lost too often;
    130 it was told to end by SIGTERM or Ctrl-C.
    """
    from holdfast.config import StagerConfig
    from operator_side.supervise.core import Core
    from operator_side.supervise.limits import Limits
    from operator_side.supervise.supervisor import Supervisor, environment_of_job, next_attempt

    if options["min_ranks"] is not None and options["min_ranks"] > options["ranks"]:
        raise ConfigError(f"--min-ranks {options['min_ranks']} is more than --ranks {options['ranks']}")
    logging.getLogger("holdfast.run").setLevel(logging.INFO)
    config = StagerConfig.from_sources(store=options["store"], **_settings(options["settings"]))
    fleet = _fleet(options)
    logs = _logs(options["logs"], config.store)
    lock = _lock(logs)
    try:
        events = config.events or logs / "events.jsonl"
        limits = Limits(
            ranks=options["ranks"],
            ranks_min=options["min_ranks"] or options["ranks"],
            **{
                name: options[name]
                for name in (
                    "crashes_max",
                    "restarts_max",
                    "grace_seconds",
                    "silent_seconds_max",
                    "stall_seconds_max",
                    "hosts_seconds_max",
                )
            },
        )
        core = Core(
            limits,
            _pause_seconds,
            first_attempt=next_attempt(logs),
            newest_step=_newest_step(config.store),
            now=time.monotonic(),
        )

        def line(launch: Launch) -> list[str]:
            return _mpirun(launch, command, config, events, options)

        supervisor = Supervisor(
            core,
            fleet,
            line,
            environment_of_job(),
            store=config.store,
            runtime_dir=config.runtime_dir,
            logs=logs,
            events=events,
            relay=_relay,
            poll_seconds=options["poll_seconds"],
        )
        verdict = supervisor.run()
    finally:
        lock.close()
    if verdict.exit_code:
        stopped = verdict.cause.value == "stopped"
        _say_why(verdict.message, [] if stopped else supervisor.last_words(verdict), logs)
        if not stopped:
            click.echo(f"help: {help_for(getattr(_kind(verdict.exception), 'code', 'run'))}", err=True)
    return int(getattr(_kind(verdict.exception), "exit_code", verdict.exit_code))


def _say_why(message: str, words: Sequence[str], logs: Path) -> None:
    from holdfast.command.output import plain

    for word in words:
        click.echo(plain(word), err=True)
    click.echo(plain(f"holdfast run: {message}; logs: {logs}"), err=True)


def _kind(exception: str) -> object:
    """The error's class, where a rank ended with one of holdfast's own errors: Python itself ends with 1."""
    from holdfast import errors

    return getattr(errors, exception.rpartition(".")[2], None) if exception.startswith("holdfast.") else None


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or name == "store":
            raise ConfigError(
                f"--set {pair}: expected NAME=VALUE with a setting of the stager, such as ring_bytes=4GiB"
            )
        found[name.replace("-", "_")] = value
    return found


def _fleet(options: dict[str, Any]) -> Fleet:
    from operator_side.supervise.hosts import Here, HostFile, Slurm

    chosen = [name for name in ("hosts", "slurm", "cluster") if options[name]]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]} and --{chosen[1]}: expected one place that hosts come from")
    agent = shlex.split(options["agent"]) if options["agent"] else None
    if options["hosts"]:
        return HostFile(options["hosts"], agent=agent)
    if options["slurm"]:
        return Slurm()
    if options["cluster"]:
        from operator_side.cluster.fleet import fleet_of

        return fleet_of(options["cluster"])
    return Here()


def _logs(given: Path | None, store: str) -> Path:
    if given is None:
        import platformdirs

        from holdfast.ring.directory import run_key

        given = Path(platformdirs.user_state_dir("holdfast", appauthor=False)) / "runs" / run_key(store)
    try:
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--logs {given}: cannot be made: {error.strerror}; name another directory"
        ) from error
    return given.absolute()


def _lock(logs: Path) -> IO[str]:
    """One supervisor for a log directory, hence for a run on this machine; given back by the kernel."""
    file = (logs / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise FencedError(f"{logs}: process {owner} already supervises this run here; end it first") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _newest_step(store: str) -> int:
    """Newest step of the run; -1 if there is none. A store that cannot be read is said before anything starts."""
    from holdfast.checkpoints.catalog import Catalog
    from holdfast.store import open_store

    opened = open_store(store)
    try:
        return max((item.step for item in Catalog(opened).list() if not item.fault), default=-1)
    except StoreMissing:
        return -1
    finally:
        close = getattr(opened, "close", None)
        if close is not None:
            close()


def _mpirun(
    launch: Launch, command: Sequence[str], config: StagerConfig, events: Path, options: dict[str, Any]
) -> list[str]:
    from holdfast.mpirun import mpirun_command
    from holdfast.supervised import ATTEMPT_VARIABLE
    from operator_side.supervise.rank import STAGER, TRAINER

    keeper = [sys.executable, "-m", "operator_side.supervise.rank"]
    settings = {**_settings(options["settings"]), "store": config.store, "events": str(events)}
    stager = [*keeper, STAGER, sys.executable, "-m", "holdfast", "stager", *_arguments(settings)]
    more = ["--output", "tag", *shlex.split(options["mpirun_options"])]
    if options["agent"]:
        more += ["--prtemca", "plm_ssh_agent", options["agent"]]
    hosts = None if launch.hosts is None else {host.name: host.slots for host in launch.hosts}
    if hosts is not None:
        names = {n for n in os.environ if n.startswith(_FORWARDED)} - set(_NOT_FORWARDED) | set(
            options["exported"]
        )
        for name in sorted(names & os.environ.keys() | {ATTEMPT_VARIABLE}):
            more += ["-x", name]
    return mpirun_command(
        launch.ranks,
        [*keeper, TRAINER, *command],
        stager=stager,
        ulfm=options["ulfm"],
        hosts=hosts,
        stager_host=options["stager_host"] or socket.gethostname(),
        options=more,
    )


def _arguments(settings: dict[str, str]) -> list[str]:
    found: list[str] = []
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        if name in {"verify", "linger"}:
            yes = value.lower() in {"1", "true", "yes", "on"}
            found.append(option if yes else option.replace("--", "--no-", 1))
        else:
            found += [option, value]
    return found


def _pause_seconds(number: int) -> float:
    """Full jitter under a bound that doubles, as everywhere here (holdfast/store/retrying.py)."""
    import tenacity

    wait = tenacity.wait_random_exponential(_PAUSE_SECONDS_FIRST, max=_PAUSE_SECONDS_MAX)
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = number
    return float(wait(state))


def _relay(stream: str, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    try:
        out.write(text + "\n")
        out.flush()
    except (OSError, ValueError):  # nobody reads it any more; the files have it
        pass
