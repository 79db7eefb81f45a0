"""The standing stager of `holdfast run --launcher torchrun`: listens on loopback, restarted at the same address.

start ─► listens at a port that the system chose ─► dies ─► pause ─► start at the same port: ranks join it again
                                                     └─ too often without a newer checkpoint ─► give up

Its ring survives its death, because this process keeps the ring and the flusher is a separate process. The stager makes
the key, and ranks of the same user find it (holdfast/stager_key.py); a key from the settings reaches both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.supervised import KEPT_VARIABLE
from holdfast.telemetry.status_socket import request_status, socket_path
from operator_side.supervise.flusher import KeptFlusher
from operator_side.supervise.tied import tied_command

RESTARTS_MAX = 4  # in a row without a newer checkpoint
_ANY_PORT = "127.0.0.1:0"
_ASK_SECONDS_MAX = 2.0


class KeptStager:
    """Only for the main thread: the kernel ties a process to the thread that started it. `arguments`: of `holdfast
    stager`, without its address. `pause_seconds`: before restart n (1, 2, …) in a row. `restarts`: the owner resets it
    at a newer checkpoint. Raises `ConfigError`: others may write to the runtime directory.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        ring: Path,
        pause_seconds: Callable[[int], float],
    ) -> None:
        self._arguments, self._environment = list(arguments), {**environment, KEPT_VARIABLE: str(os.getpid())}
        self._ring, self._pause_seconds = ring, pause_seconds
        self._flusher = KeptFlusher(ring)
        self.address, self.restarts = _ANY_PORT, 0
        self._restart_at: float | None = None
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-P", "-m", "holdfast", "stager", "--listen", self.address, *self._arguments]
        # A session of its own: Ctrl-C must only reach the ranks, whose last checkpoint the stager has to receive.
        return subprocess.Popen(
            tied_command(line), stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True
        )

    def check_listening(self) -> bool:
        """Whether the first stager answers; from then on `address` is known."""
        with contextlib.suppress(HoldfastError):
            answer = request_status(socket_path(self._ring, "stager"), seconds_max=_ASK_SECONDS_MAX)
            if answer is not None and answer.pid == self._process.pid and answer.waits_at:
                self.address = answer.waits_at
                return True
        return False

    def poll(self) -> int | None:
        """Exit code, or minus the number of the signal; None while the stager runs or a restart is pending."""
        return self._process.poll() if self._restart_at is None else None

    def schedule_restart(self) -> float | None:
        """Schedule a restart after the stager's end. Return the pause in seconds; None if it has ended too often."""
        if self.restarts >= RESTARTS_MAX:
            return None
        self.restarts += 1
        pause_seconds = self._pause_seconds(self.restarts)
        self._restart_at = time.monotonic() + pause_seconds
        return pause_seconds

    def restart_if_due(self) -> None:
        """Start the stager if its pause is over."""
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self._restart_at, self._process = None, self._start()

    def stop(self) -> None:
        """Ask the stager to accept no further job and exit; the flusher exits once everything staged is stored."""
        self._restart_at = None
        self._flusher.release()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait_for_exit(self, seconds: float) -> bool:
        """After `stop`: wait up to `seconds` for stager and flusher to exit. Return whether both have."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return self._flusher.wait_for_exit(max(0.0, deadline - time.monotonic()))
        return False

    @property
    def has_leftover_ring(self) -> bool:
        """After `wait_for_exit`: whether the ring still holds checkpoints that are not in the store."""
        return self._flusher.has_leftover_ring

    def close(self) -> None:
        """Kill the stager if it still runs; the flusher keeps running."""
        self._flusher.release()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
