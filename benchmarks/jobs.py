"""Starts the jobs of a benchmark, and leaves no process or file of them behind.

job "ranks"    n × benchmarks.rank    : 1 × holdfast stager (which starts the flusher in a session of its own)
               or torchrun with the ranks, and a standing stager
job "raw_mpi"  n × benchmarks.raw_mpi : 1 × benchmarks.raw_mpi receiver
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.machine import file_system
from holdfast.mpirun import mpirun_command
from holdfast.net.key import new_key

__all__ = [
    "OF_RENDEZVOUS",
    "Folders",
    "Job",
    "StandingStager",
    "TorchrunJob",
    "end_process",
    "flusher_pids",
    "folders",
    "rank_environment",
    "run",
    "started",
    "torchrun_line",
]

_END_SECONDS_MAX = 60.0
_KILL_SECONDS_MAX = 5.0
_RUN_SECONDS_MAX = 300.0
_LISTEN_SECONDS_MAX = 180.0
_LOOK_SECONDS = 0.02
OF_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")  # torchrun sets these itself


@dataclass(frozen=True)
class Folders:
    """Folders of a benchmark, removed at its end."""

    scratch: Path
    runtime: Path

    @property
    def store(self) -> Path:
        return self.scratch / "store" / "run"


@contextlib.contextmanager
def folders(parent: Path | None) -> Iterator[Folders]:
    """Make the folders, and remove them with their contents at the end.

    Args:
        parent: Where the peers write; by default the folder for temporary files.

    Raises:
        RuntimeError: `parent` is a tmpfs: writes to memory say nothing about a checkpoint on disk.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=parent)))
        if file_system(scratch) == "tmpfs":
            raise RuntimeError(f"{scratch} is in memory (tmpfs); give --folder a place on a disk")
        (scratch / "store").mkdir()
        # In memory, in a folder of this run's own.
        runtime = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm"))
        )
        stack.callback(_end_flushers, runtime)
        yield Folders(scratch, runtime)


def rank_environment(
    ranks: int, folders: Folders, *, chunk_bytes: int, ring_bytes: int | None
) -> dict[str, str]:
    """Return the environment of a job: without outside settings of holdfast or MPI, one thread for arithmetic."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = str(Path(__file__).resolve().parents[1])
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMIX_", "HOLDFAST_"))
    }
    return {
        **kept,
        "HOLDFAST_RUNTIME_DIR": str(folders.runtime),
        "HOLDFAST_CHUNK_BYTES": str(chunk_bytes),
        **({} if ring_bytes is None else {"HOLDFAST_RING_BYTES": str(ring_bytes)}),
        "HOLDFAST_KEEP_LAST": "1",  # retention removes old checkpoints, as the other peers do themselves
        "HOLDFAST_NICENESS": "10" if ranks <= (os.cpu_count() or 1) else "0",  # as docs/stager.md advises
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONWARNINGS": "ignore",  # of the peers' libraries about each other
        "WORLD_SIZE": str(ranks),
        "XDG_STATE_HOME": str(folders.scratch / "state"),  # the flusher's log
    }


class Job:
    """One mpirun. A context manager: at its end sends SIGTERM, then kills the job if it does not stop.

    Args:
        ranks: Number of `trainer` processes.
        trainer, last: Arguments after the Python interpreter, for those and for the last rank.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        trainer: Sequence[str],
        last: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
    ) -> None:
        command = mpirun_command(ranks, [sys.executable, *trainer], stager=list(last))
        self._launch(command, environment, folder / f"{name}.log")

    def _launch(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._process = started(command, environment, log)

    def find(self, word: str) -> int:
        """Return the process id of the rank that has `word` among its arguments."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if word in process.cmdline() and "mpirun" not in process.name():
                    return process.pid
        raise RuntimeError(f"no process of {self.log.stem} has {word!r} on its command line")

    def pids(self) -> list[int]:
        """Process ids of the ranks and all their descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [process.pid for process in psutil.Process(self._process.pid).children(recursive=True)]
        return []

    @property
    def ended(self) -> bool:
        """Whether mpirun has exited."""
        return self._process.poll() is not None

    def said(self) -> str:
        """Return the end of the job's output."""
        return self.log.read_text(errors="replace")[-4000:]

    def end(self) -> int:
        """Wait for the job to exit, as it does when its ranks get no more orders; return its exit code."""
        try:
            return self._process.wait(_END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"job {self.log.stem} did not end within {_END_SECONDS_MAX:.0f} s:\n{self.said()}"
            ) from None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is not None:
            return
        # mpirun forwards SIGTERM to its ranks, and is alone in its process group.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS_MAX)
                return


class StandingStager:
    """A standing stager. A context manager: at its end sends SIGTERM, then kills the stager if it does not stop.

    Args:
        listen: The address to listen at.
        inside: Prefix of the stager's command, such as `ip netns exec NAME`.
        key: The ranks' key; empty: a new one.
        name: Name of the log.

    Attributes:
        address: HOST:PORT.
        joining: The environment of ranks that join this stager alone.

    Raises:
        RuntimeError: The stager does not start to listen.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        listen: str = "127.0.0.1",
        inside: Sequence[str] = (),
        key: str = "",
        name: str = "stager",
    ) -> None:
        log, secret = folder / f"{name}.log", {"HOLDFAST_KEY": key or new_key()}
        self.process = started([*inside, *command, "--listen", f"{listen}:0"], {**environment, **secret}, log)
        deadline = time.monotonic() + _LISTEN_SECONDS_MAX
        while not (found := re.search(r"listens at (\S+);", log.read_text(errors="replace"))):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(f"the stager does not listen:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(_LOOK_SECONDS)
        self.address = found[1]
        self.joining = {"HOLDFAST_STAGER": self.address, **secret}

    def end(self) -> None:
        """Let the stager write the staged checkpoints, and exit."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_END_SECONDS_MAX)

    def __enter__(self) -> StandingStager:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class TorchrunJob(Job):
    """One torchrun with a standing stager. Arguments as of `Job`; `inside` as of `StandingStager`."""

    def __init__(
        self,
        name: str,
        ranks: int,
        trainer: Sequence[str],
        last: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        inside: Sequence[str] = (),
    ) -> None:
        self._stager = StandingStager(last, environment, folder, inside=inside)
        kept = {name: value for name, value in environment.items() if name not in OF_RENDEZVOUS}
        self._launch(torchrun_line(ranks, trainer), {**kept, **self._stager.joining}, folder / f"{name}.log")

    def find(self, word: str) -> int:
        return self._stager.process.pid if word == "stager" else super().find(word)

    def pids(self) -> list[int]:
        return [self._stager.process.pid, *super().pids()]

    def end(self) -> int:
        """As `Job.end`; the stager ends after torchrun."""
        code = super().end()
        self._stager.end()
        return code

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._stager.end()


def torchrun_line(ranks: int, trainer: Sequence[str], *, restarts: int = 0) -> list[str]:
    """Return the torchrun command for `ranks` on this machine; `trainer`: arguments after the interpreter."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*line, "--max-restarts", str(restarts), *trainer]


def started(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with its output in `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def flusher_pids(runtime: Path) -> list[int]:
    """Return the process ids of the flushers with rings under `runtime`, in the order of their stagers.

    Raises:
        RuntimeError: No flusher has a ring there.
    """
    found = [int(file.read_text().split()[0]) for file in sorted(runtime.glob("*/flusher.pid"))]
    if not found:
        raise RuntimeError(f"no flusher.pid under {runtime}")
    return found


def _end_flushers(runtime: Path) -> None:
    """End the flushers that a failed benchmark left: a flusher outlives its job on purpose."""
    with contextlib.suppress(RuntimeError):
        for pid in flusher_pids(runtime):
            with contextlib.suppress(psutil.NoSuchProcess):
                _end_flusher(psutil.Process(pid), runtime)


def _end_flusher(process: psutil.Process, runtime: Path) -> None:
    if str(runtime) not in process.cmdline():
        return  # the pid belongs to another process by now
    process.terminate()
    try:
        process.wait(_KILL_SECONDS_MAX)
    except psutil.TimeoutExpired:
        process.kill()


def end_process(pid: int) -> bool:
    """Wait for process `pid` (not our child) to exit, and kill it if it does not.

    Returns:
        Whether the process ended by itself.
    """
    try:
        process = psutil.Process(pid)
        process.wait(_END_SECONDS_MAX)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        process.kill()
        return False
    return True


def run(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run an MPI job to its end; kill it with all its ranks after five minutes.

    Raises:
        RuntimeError: The job failed or was killed; the message holds the end of its output.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(_RUN_SECONDS_MAX)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        raise RuntimeError(f"{log.stem} ended with {code}:\n{log.read_text(errors='replace')[-4000:]}")
