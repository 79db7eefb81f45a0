"""One mpirun: started, read, and ended so that no process of it is left on this machine.

mpirun and everything it starts here are one session, tied to this process: they end when it is killed. (The flusher has
a session of its own.) mpirun makes a process group of each rank, so the whole session is swept, not a group. On other
hosts the daemons of mpirun end their ranks when the connection to mpirun ends.
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
from operator_side.supervise.tied import tied

_SWEEP_SECONDS_MAX = 10.0
_READ_BYTES = 1 << 16


class Attempt:
    """A started mpirun. Main thread: the kernel ties processes to the thread that starts them."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            tied(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output: IO[bytes] = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._end = os.pidfd_open(self._process.pid)
        self._is_silent = False  # nobody has its output any more

    @property
    def descriptors(self) -> list[int]:
        """One of them can be read when there is output, or when mpirun has ended."""
        return [self._end] if self._is_silent else [self._end, self.output.fileno()]

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> bytes:
        """New output of mpirun, or nothing."""
        try:
            data = os.read(self.output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return b""
        self._is_silent = not data
        return data

    def poll(self) -> int | None:
        """Exit status of mpirun; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send mpirun a signal. It passes SIGURG, SIGUSR1 and SIGUSR2 on to every process of the job."""
        self._process.send_signal(number)

    def kill(self) -> list[int]:
        """SIGKILL mpirun and every process of its session. Returns those that were there."""
        self.send(signal.SIGKILL)
        found = processes_of_session(self.pid)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def sweep(self) -> list[int]:
        """After mpirun has ended: kill what is left of its session. Returns processes that live after ten seconds."""
        deadline = time.monotonic() + _SWEEP_SECONDS_MAX
        while (left := self.kill()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def close(self) -> None:
        self.output.close()
        os.close(self._end)


def processes_of_session(session: int) -> list[int]:
    """Running processes of a session; zombies do not count."""
    return [pid for pid in running_processes() if (stat := process_stat(pid)) and stat.session == session]
