"""TCP ports for servers that a test starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_WORKERS_MAX = 8
_FIRST = 10_000
_taken = itertools.count(random.SystemRandom().randrange(1 << 16))  # a test may have seeded `random`


def free_port() -> int:
    """Return a TCP port of this machine on which nothing listens now.

    No other process may take the port between this call and the server's start. The port therefore lies below the
    kernel's ephemeral ports, each worker of pytest-xdist has a range of its own, and a process takes the ports of its
    range in turn.
    """
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    size = (max(kernels, 2 * _FIRST) - _FIRST) // _WORKERS_MAX
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw7").removeprefix("gw")) % _WORKERS_MAX
    while True:
        port = _FIRST + worker * size + next(_taken) % size
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
