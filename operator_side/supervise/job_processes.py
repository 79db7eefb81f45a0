"""The processes of the job: one attempt at a time, its output, and the folder for MPI's shared memory.

launch ─► mpirun ── output ─► a log file for each process, reports for the core ─► swept after mpirun has ended

mpirun and everything it starts here share one session and are tied to this process: killing this process ends them. The
flusher has a session of its own. mpirun makes a process group of each rank, so `sweep` kills by session, not by group.
On other hosts mpirun's daemons end their ranks when the connection to mpirun closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from holdfast.process import process_stat, running_processes, wait_readable
from holdfast.supervised import ATTEMPT_VARIABLE, SET_ASIDE_VARIABLE
from operator_side.supervise.flusher import SegmentFolder
from operator_side.supervise.job_output import Output
from operator_side.supervise.supervisor_messages import Launch, Report
from operator_side.supervise.tied import tied_command
from operator_side.supervise.verdict import Verdict

_log = logging.getLogger("holdfast.run")

_SWEEP_SECONDS_MAX = 10.0
_READ_BYTES = 1 << 16


class RunFiles(NamedTuple):
    """Where a supervised run keeps its files, all on this machine, which is not preempted."""

    # Runtime directories of the run, one per stager in their order; kept for the next attempt.
    rings: tuple[Path, ...]
    logs: Path  # `status.jsonl`, with a line for each decision, and a folder for each attempt
    events: Path  # the event log that stager and flusher write


class JobProcesses:
    """Starts, reads and ends attempts. Main thread: the kernel ties a process to the thread that started it."""

    def __init__(
        self,
        command: Callable[[Launch], Sequence[str]],
        environment: Mapping[str, str],
        files: RunFiles,
        relay: Callable[[str, str], None],
    ) -> None:
        self._command, self._environment = command, environment
        self._logs, self._relay, self._stagers = files.logs, relay, len(files.rings)
        self._segments = SegmentFolder(files.rings[0])
        self._attempt: Attempt | None = None
        self._output: Output | None = None  # kept after the attempt, for `log_excerpt`

    def launch(self, launch: Launch) -> None:
        directory = self._logs / f"attempt-{launch.attempt:03d}"
        self._output = Output(directory, launch.ranks, self._relay, stagers=self._stagers)
        environment = {**self._environment, ATTEMPT_VARIABLE: str(launch.attempt)}
        if launch.set_aside:
            labels = [environment.get(SET_ASIDE_VARIABLE, ""), *(key.label for key in launch.set_aside)]
            environment[SET_ASIDE_VARIABLE] = ",".join(filter(None, labels))
        if launch.hosts is None:
            environment = self._segments.prepare(environment)
        self._attempt = Attempt(self._command(launch), environment)

    def wait(self, seconds: float, wake_fd: int) -> None:
        """Wait for output, the end of mpirun, or the descriptor `wake_fd`, but at most this long."""
        wait_readable([wake_fd, *(self._attempt.descriptors if self._attempt else [])], seconds)

    def poll(self) -> tuple[list[Report], int | None]:
        """Return the processes' reports, and mpirun's exit status if it has just ended."""
        attempt, output = self._attempt, self._output
        if attempt is None or output is None:
            return [], None
        status = attempt.poll()  # poll before the last read, so that no final output is missed
        reports = _read(attempt, output)
        if status is None:
            return reports, None
        left = attempt.sweep()
        if left:
            _log.error("processes %s of the job were killed and have not ended; look at them with ps", left)
        reports += [*_read(attempt, output), *output.feed(b"")]
        attempt.close()
        output.close()
        self._segments.remove()
        self._attempt = None
        return reports, status

    def terminate(self, *, gently: bool) -> None:
        """Ask the trainers to end if `gently`; otherwise ask mpirun."""
        # rank.py turns SIGURG into SIGTERM for the trainer.
        self.forward_signal(signal.SIGURG if gently else signal.SIGTERM)

    def forward_signal(self, number: int) -> None:
        """Send a signal to mpirun, which forwards SIGUSR1 to every rank. Ranks that do not watch for it ignore it."""
        if self._attempt is not None:
            self._attempt.send(number)

    def kill(self) -> None:
        if self._attempt is not None:
            self._attempt.kill()

    def close(self) -> None:
        """Kill the remaining processes and remove the folder for shared memory."""
        if self._attempt is not None:
            self._attempt.sweep()
            self._attempt.close()
        self._segments.remove()

    def log_excerpt(self, verdict: Verdict) -> list[str]:
        """Return the end of the log that explains this verdict best, and the path of the whole log."""
        if self._output is None:
            return []
        return [*self._output.tail(verdict.rank), f"[the whole log: {self._output.path(verdict.rank)}]"]


def _read(attempt: Attempt, output: Output) -> list[Report]:
    reports: list[Report] = []
    while data := attempt.read():
        reports += output.feed(data)
    return reports


class Attempt:
    """Running mpirun. Only for the main thread: the kernel ties a process to the thread that started it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            tied_command(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output: IO[bytes] = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._exit_fd = os.pidfd_open(self._process.pid)
        self._is_at_eof = False  # output has reached end of file

    @property
    def descriptors(self) -> list[int]:
        """Descriptors for poll: readable when mpirun has written output or has ended."""
        return [self._exit_fd] if self._is_at_eof else [self._exit_fd, self.output.fileno()]

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> bytes:
        """Return new output of mpirun, or empty bytes if there is no output yet."""
        try:
            data = os.read(self.output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return b""
        self._is_at_eof = not data
        return data

    def poll(self) -> int | None:
        """Return mpirun's exit status; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send mpirun a signal. mpirun forwards SIGURG, SIGUSR1 and SIGUSR2 to every process of the job."""
        self._process.send_signal(number)

    def kill(self) -> list[int]:
        """SIGKILL mpirun and every process of its session. Return their process ids."""
        self.send(signal.SIGKILL)
        found = processes_of_session(self.pid)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def sweep(self) -> list[int]:
        """After mpirun has ended: kill the rest of its session. Return those still alive after ten seconds."""
        deadline = time.monotonic() + _SWEEP_SECONDS_MAX
        while (left := self.kill()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def close(self) -> None:
        self.output.close()
        os.close(self._exit_fd)


def processes_of_session(session: int) -> list[int]:
    """Return the running processes of a session, without zombies."""
    return [pid for pid in running_processes() if (stat := process_stat(pid)) and stat.session == session]
