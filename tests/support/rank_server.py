"""A process that has imported torch and the trainer, and forks the ranks of one job after the other.

    test ── socket ──► server ── fork ──► launcher of a job, a session of its own ── fork ──► rank 0, rank 1, …
         ◄─────── its process id, and at the end exit code and CPU seconds ─────┘

Importing torch is most of a test rank's cost. A rank has torchrun's variables and an interpreter that ends as any
other. /proc shows the server's environment for the ranks too, so do not look for ranks by their environment.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.process import set_parent_death_signal
from tests.support.job import QUICK_SITE, REPOSITORY

__all__ = ["ForkedRanks", "cpu_seconds_of_ranks"]

_START_SECONDS_MAX = 120.0
_MESSAGE_BYTES_MAX = 1 << 20
_cpu_seconds: list[float] = []


class ForkedRanks:
    """The ranks of a job, with the interface of a `subprocess.Popen` whose process waits for them.

    Args:
        trainer: The script and its arguments.
        env: The whole environment of each rank, but for RANK and LOCAL_RANK. RANKS_IMPORT: modules that are imported
            once for them.
        log: Their output is appended to it.
    """

    def __init__(self, ranks: int, trainer: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(_address())
        wish = {"ranks": ranks, "trainer": trainer, "env": dict(env), "log": str(log), "cwd": str(Path.cwd())}
        self._socket.send(json.dumps(wish).encode())
        self.pid = int(self._socket.recv(_MESSAGE_BYTES_MAX))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code of the highest rank that failed, or minus its signal; None while a rank lives."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`."""
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("ranks", timeout)
        return code

    def _ended(self, seconds_max: float | None) -> int | None:
        if self.returncode is None:
            self._socket.settimeout(seconds_max)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                code, _, cpu_seconds = self._socket.recv(_MESSAGE_BYTES_MAX).decode().partition(" ")
                self.returncode = int(code or -signal.SIGKILL)  # the launcher itself may have been killed
                _cpu_seconds.append(float(cpu_seconds or 0))
                self._socket.close()
        return self.returncode


def cpu_seconds_of_ranks() -> float:
    """CPU seconds of all ended jobs of this process; they are not its children, so the kernel does not count them."""
    return sum(_cpu_seconds)


class _Server:
    """The server of this process, which ends with it."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="ranks-")
        self.address = f"{folder}/socket"
        env = {**os.environ, "PYTHONPATH": f"{QUICK_SITE}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
        env.pop("PYTEST_CURRENT_TEST", None)  # the server outlives this test
        line = [sys.executable, "-u", __file__, self.address]
        self.process = subprocess.Popen(line, stdin=subprocess.DEVNULL, env=env)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(self.process.kill)
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not Path(self.address).exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)


_servers: list[_Server] = []


def _address() -> str:
    """The server's address; starts a new server if a hanging test has taken the last one down."""
    if not _servers or _servers[-1].process.poll() is not None:
        _servers.append(_Server())
    return _servers[-1].address


def main() -> int:
    """Serve forever; returns only in the launchers and the ranks."""
    set_parent_death_signal()
    # The scripts' imports: none of these modules reads a rank's variables on import.
    import torch

    from trainer_side import Checkpointer
    from trainer_side.ranks.c10d_world import C10dWorld

    del torch, Checkpointer, C10dWorld
    address = sys.argv[1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{address}.bound")
        listening.listen()
        os.rename(f"{address}.bound", address)  # noqa: PTH104 - clients can connect from now on
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for launchers
        while True:
            client, _ = listening.accept()
            if not os.fork():
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _launch(client)


def _launch(client: socket.socket) -> int:
    """Fork the ranks: runs in the launcher, returns in the launcher and in each rank."""
    wish: dict[str, Any] = json.loads(client.recv(_MESSAGE_BYTES_MAX))
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(wish["env"])
    os.chdir(wish["cwd"])
    log = os.open(wish["log"], os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    for name in wish["env"].get("RANKS_IMPORT", "").split():
        importlib.import_module(name)
    pids = []
    for rank in range(wish["ranks"]):
        if pid := os.fork():
            pids.append(pid)
            continue
        client.close()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        sys.argv = wish["trainer"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    client.send(str(os.getpid()).encode())
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    code = next((code for code in reversed(codes) if code), 0)
    client.send(f"{code} {sum(os.times()[:4])}".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
