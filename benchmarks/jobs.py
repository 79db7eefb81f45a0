"""The jobs of a benchmark, and the certainty that nothing of them is left afterwards.

job "ranks"    n × benchmarks.rank    : 1 × holdfast stager (which starts the flusher in a session of its own)
               or torchrun with them, and the stager alone
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
OF_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")  # torchrun says them itself


@dataclass(frozen=True)
class Folders:
    """Where a benchmark keeps what it writes: all of it is removed at its end."""

    scratch: Path
    runtime: Path

    @property
    def store(self) -> Path:
        return self.scratch / "store" / "run"


@contextlib.contextmanager
def folders(parent: Path | None) -> Iterator[Folders]:
    """Make the folders, and remove them with all they hold.

    Args:
        parent: Where the peers write; by default the place for temporary files.

    Raises:
        RuntimeError: That is a tmpfs: writing to memory measures nothing that a checkpoint needs.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=parent)))
        if file_system(scratch) == "tmpfs":
            raise RuntimeError(f"{scratch} is in memory (tmpfs); give --folder a place on a disk")
        (scratch / "store").mkdir()
        # The ring belongs in memory, and beside no other run's.
        runtime = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm"))
        )
        stack.callback(_end_flushers, runtime)
        yield Folders(scratch, runtime)


def rank_environment(
    ranks: int, folders: Folders, *, chunk_bytes: int, ring_bytes: int | None
) -> dict[str, str]:
    """The environment of a job: nothing of holdfast's or MPI's from outside, one thread for arithmetic."""
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
        "HOLDFAST_KEEP_LAST": "1",  # retention removes what the other peers remove themselves
        "HOLDFAST_NICENESS": "10" if ranks <= (os.cpu_count() or 1) else "0",  # as docs/stager.md has it
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
    """One mpirun. A context manager: at its end it is asked to stop, and killed if it does not.

    Args:
        ranks: Number of `trainer` processes.
        trainer, last: Arguments after the Python interpreter, of those and of the last rank.
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
        """Process id of the rank of this job that has `word` among its arguments."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if word in process.cmdline() and "mpirun" not in process.name():
                    return process.pid
        raise RuntimeError(f"no process of {self.log.stem} has {word!r} on its command line")

    def pids(self) -> list[int]:
        """Process ids of the ranks and all that they have started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [process.pid for process in psutil.Process(self._process.pid).children(recursive=True)]
        return []

    @property
    def ended(self) -> bool:
        """Whether mpirun is gone."""
        return self._process.poll() is not None

    def said(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-4000:]

    def end(self) -> int:
        """Wait for the job to end by itself, as it does when its ranks have no more orders; its exit code."""
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
        # mpirun passes SIGTERM on to its ranks, and leads a group that holds nobody else.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS_MAX)
                return


class StandingStager:
    """A stager that stands alone. A context manager: at its end it is asked to stop, and killed if it does not.

    Args:
        listen: The address that it listens at.
        inside: What its command begins with, such as `ip netns exec NAME`.
        key: That of the ranks; empty: a new one.
        name: Its log's.

    Attributes:
        address: HOST:PORT.
        joining: The environment of ranks that have this stager alone.

    Raises:
        RuntimeError: It does not come to listen.
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
        """Have it write what is staged, and end."""
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
    """One torchrun, and a stager that stands alone beside it. Arguments as of `Job`; `inside` as of that stager."""

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
        """As `Job`."""
        return self._stager.process.pid if word == "stager" else super().find(word)

    def pids(self) -> list[int]:
        """As `Job`."""
        return [self._stager.process.pid, *super().pids()]

    def end(self) -> int:
        """As `Job`; the stager ends after it."""
        code = super().end()
        self._stager.end()
        return code

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._stager.end()


def torchrun_line(ranks: int, trainer: Sequence[str], *, restarts: int = 0) -> list[str]:
    """Starts this many ranks on this machine; `trainer`: arguments after the Python interpreter."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*line, "--max-restarts", str(restarts), *trainer]


def started(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process that leads a session of its own; what it says goes to `log`."""
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
    """Process ids of the flushers whose rings lie under `runtime`: one for each stager, the first one's first.

    Raises:
        RuntimeError: No flusher runs there.
    """
    found = [int(file.read_text().split()[0]) for file in sorted(runtime.glob("*/flusher.pid"))]
    if not found:
        raise RuntimeError(f"no flusher.pid under {runtime}")
    return found


def _end_flushers(runtime: Path) -> None:
    """End what a failed benchmark left: a flusher outlives its job, which is its purpose."""
    with contextlib.suppress(RuntimeError):
        for pid in flusher_pids(runtime):
            with contextlib.suppress(psutil.NoSuchProcess):
                _end_flusher(psutil.Process(pid), runtime)


def _end_flusher(process: psutil.Process, runtime: Path) -> None:
    if str(runtime) not in process.cmdline():
        return  # a pid that was used again
    process.terminate()
    try:
        process.wait(_KILL_SECONDS_MAX)
    except psutil.TimeoutExpired:
        process.kill()


def end_process(pid: int) -> bool:
    """Wait for the end of process `pid` (not our child), and kill it if it does not come.

    Returns:
        Whether it ended by itself.
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
    """Run an MPI job to its end; killed with all its ranks if it takes five minutes.

    Raises:
        RuntimeError: It failed, or was killed; the message holds the end of its output.
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
