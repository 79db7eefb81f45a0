"""One mpirun: starts it, reads its output, and ends it without leaving a process on this machine.

mpirun and everything it starts here share one session and are tied to this process: killing this process ends them. The
flusher has a session of its own. mpirun makes a process group of each rank, so `sweep` kills by session, not by group.
On other hosts mpirun's daemons end their ranks when the connection to mpirun closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from holdfast.process import process_stat, running_processes
from operator_side.supervise.tied import tied_command

_SWEEP_SECONDS_MAX = 10.0
_READ_BYTES = 1 << 16


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
